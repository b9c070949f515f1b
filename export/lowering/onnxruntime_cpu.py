"""Portable graph -> the form that ONNX Runtime's CPU kernels run best: one request, caches updated in place.

The caches are written by TensorScatter and read by com.microsoft.GroupQueryAttention. Where the runtime binds a cache's
input and output to one buffer neither copies it: a step costs what it reads, whatever the capacity. The weights stay in
the portable graph's .data file.
"""

from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes import common as passes

from dspark.export.lowering.attention import lower_attention
from dspark.export.lowering.projections import collapse_reshapes, merge_projections
from dspark.export.lowering.recurrent import lower_recurrent
from dspark.export.rewriting import remove_unused
from dspark.manifest import Graph

FORM = "onnxruntime-cpu"
OPSET = 24  # the first with TensorScatter
DROPPED = ("row_start", "context_start", "pages")  # one request: T and Tc say it all
SINGLE = ("R", "P", "N")  # dimensions that are 1


def lower(folder: Path, graph: Graph) -> Graph:
    """Write the lowered form of a portable graph beside it and return its manifest entry.

    Requires: `graph` is of form portable and lies in `folder`. Ensures: the same inputs without DROPPED, the same
    outputs, dimensions SINGLE are 1; a drafter's step may write its block's rows behind the committed ones.
    """
    model = ir.load(folder / graph.file)
    lower_model(model)
    file = graph.file.removesuffix(".onnx") + ".cpu.onnx"
    ir.save(model, folder / file)
    inputs = tuple(replace(t, shape=_single(t.shape)) for t in graph.inputs if t.name not in DROPPED)
    outputs = tuple(replace(t, shape=_single(t.shape)) for t in graph.outputs)
    return replace(graph, form=FORM, file=file, inputs=inputs, outputs=outputs, cache_slack=1)


def lower_model(model: ir.Model) -> None:
    """The passes of `lower`, in place."""
    one_request(model.graph)
    lower_attention(model)
    lower_recurrent(model)
    collapse_reshapes(model)
    remove_unused(model)
    merge_projections(model)
    remove_unused(model)
    drop_inputs(model.graph)
    for part in (model, *model.functions.values()):
        part.opset_imports[""] = OPSET
    passes.NameFixPass()(model)


def _single(shape: tuple[int | str, ...]) -> tuple[int | str, ...]:
    return tuple(1 if d in SINGLE else d for d in shape)


def one_request(graph: ir.Graph) -> None:
    """Requires: the portable names of dimensions. Ensures: SINGLE are the constant 1 in the graph's interface."""
    for value in (*graph.inputs, *graph.outputs):
        assert value.shape is not None
        value.shape = ir.Shape([1 if str(d) in SINGLE else d for d in value.shape])


def drop_inputs(graph: ir.Graph) -> None:
    """Requires: nothing reads the inputs in DROPPED any more. Ensures: they are gone."""
    for value in [v for v in graph.inputs if v.name in DROPPED]:
        assert not value.uses(), f"{value.name} is still read"
        graph.inputs.remove(value)
