"""Passes over the linear layers and the reshapes around them."""

import onnx_ir as ir

from dspark.export.rewriting import Nodes, constant_ints


def merge_projections(model: ir.Model) -> None:
    """Run the linear layers of one input as one (q, k, v; gate, up): fewer, larger products for the thread pool.

    Requires: Gemm(rows, weight [out, in], transB=1) with external weights. Ensures: those Gemms of one input whose
    weights follow each other on disk are one, of a weight that spans theirs; nothing is stored for it.
    """
    graph = model.graph
    by_input: dict[ir.Value, list[tuple[ir.Node, ir.ExternalTensor]]] = {}
    for node in graph:
        if node.op_type == "Gemm" and len(node.inputs) == 2:
            rows, weight = node.inputs
            assert rows is not None and weight is not None
            if isinstance(weight.const_value, ir.ExternalTensor):
                by_input.setdefault(rows, []).append((node, weight.const_value))
    for gemms in by_input.values():
        gemms.sort(key=lambda pair: pair[1].offset or 0)
        run: list[tuple[ir.Node, ir.ExternalTensor]] = []
        for pair in [*gemms, None]:
            if pair and run and _adjoin(run[-1][1], pair[1]):
                run.append(pair)
                continue
            if len(run) > 1:
                _merge(graph, run)
            run = [pair] if pair else []


def _adjoin(first: ir.ExternalTensor, second: ir.ExternalTensor) -> bool:
    same_file = (first.location, first.dtype, first.shape[1]) == (second.location, second.dtype, second.shape[1])
    return same_file and (first.offset or 0) + first.nbytes == second.offset


def _merge(graph: ir.Graph, run: list[tuple[ir.Node, ir.ExternalTensor]]) -> None:
    tensors = [tensor for _, tensor in run]
    first, sizes = tensors[0], [int(t.shape[0]) for t in tensors]
    shape = ir.Shape([sum(sizes), first.shape[1]])
    merged = ir.ExternalTensor(
        first.location, first.offset, sum(t.nbytes for t in tensors), first.dtype,
        shape=shape, name="+".join(str(t.name) for t in tensors), base_dir=first.base_dir,
    )  # fmt: skip
    weight = graph.initializers.get(merged.name)
    if weight is None:
        weight = ir.Value(name=merged.name, shape=shape, type=ir.TensorType(first.dtype), const_value=merged)
        graph.register_initializer(weight)
    nodes = [node for node, _ in run]
    # The first in graph order: what the product needs is there, and every user comes later.
    at = Nodes(graph, min(nodes, key=list(graph).index))
    product = at.add("Gemm", nodes[0].inputs[0], weight, transB=1)
    parts = at.add_multi("Split", product, at.constant(sizes), outputs=len(sizes), axis=1)
    for node, part in zip(nodes, parts, strict=True):
        at.replace(node.outputs[0], part)
        graph.remove(node, safe=True)


def collapse_reshapes(model: ir.Model) -> None:
    """Ensures: no Reshape to a known shape (with at most one -1) reads the result of another shape change."""
    views = {"Reshape", "Unsqueeze", "Squeeze", "Identity"}
    for node in model.graph:
        if node.op_type != "Reshape":
            continue
        shape = constant_ints(node.inputs[1])
        if shape is None or shape.count(-1) > 1 or 0 in shape:
            continue
        source = node.inputs[0]
        while source is not None and (producer := source.producer()) is not None and producer.op_type in views:
            source = producer.inputs[0]
        node.replace_input_with(0, source)
        out = node.outputs[0]
        known = source is not None and source.shape is not None and out.shape is not None
        if known and source.shape == out.shape and not out.is_graph_output():
            out.replace_all_uses_with(source)
