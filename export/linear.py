"""How linear layers look in the graphs: Gemm over rows, with the weight as the checkpoint stores it."""

import onnx_ir as ir

from dspark.export.rewriting import Nodes, remove_unused


def linear_as_gemm(model: ir.Model) -> None:
    """Requires: x @ Transpose(weight) for weights [out, in]. Ensures: Gemm(rows of x, weight, transB=1) in its place.

    A backend would fold the transposed weight into a second copy; Gemm packs the stored one.
    """
    graph = model.graph
    for node in [n for n in graph if n.op_type == "MatMul"]:
        x, transposed = node.inputs
        assert x is not None and transposed is not None
        producer = transposed.producer()
        if producer is None or producer.op_type != "Transpose" or x.shape is None:
            continue
        weight = producer.inputs[0]
        assert weight is not None and weight.shape is not None
        if not weight.is_initializer() or tuple(producer.attributes["perm"].as_ints()) != (1, 0):
            continue
        at, (size_out, size_in) = Nodes(graph, node), weight.shape.numpy()
        out, rank = node.outputs[0], len(x.shape)
        rows = x if rank == 2 else at.reshape(x, [-1, size_in])
        product = at.add("Gemm", rows, weight, transB=1)
        if rank != 2:
            product = at.reshape(product, [*leading(x.shape), size_out])
        at.replace(out, product)
        graph.remove(node, safe=True)
    remove_unused(model)


def leading(shape: ir.Shape) -> list[int]:
    """All dimensions but the last for a Reshape, which can infer one of them."""
    dims = [d if isinstance(d, int) else -1 for d in shape[:-1]]
    assert dims.count(-1) <= 1, f"more than one unknown dimension in {shape}"
    return dims
