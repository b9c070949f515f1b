"""Portable graph -> the two forms that ONNX Runtime's CPU kernels run best, of one request and of many at once.

Both read the caches with com.microsoft.GroupQueryAttention, and write them with ops that update a cache in place where
the runtime binds its input and output to one buffer: a step costs what it reads, whatever the capacity and however many
requests have their pages there. The weights stay in the portable graph's .data file.
"""

from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes import common as passes

from dspark.export.lowering.attention import lower_attention
from dspark.export.lowering.batch_attention import lower_batch_attention
from dspark.export.lowering.projections import collapse_reshapes, merge_projections
from dspark.export.lowering.recurrent import lower_recurrent
from dspark.export.rewriting import remove_unused
from dspark.manifest import Graph

FORM, BATCH_FORM = "onnxruntime-cpu", "onnxruntime-cpu-batch"
FORMS = {FORM: ".cpu.onnx", BATCH_FORM: ".cpu-batch.onnx"}  # how their files' names end
OPSET = 24  # the first with TensorScatter
DROPPED = ("row_start", "context_start", "pages")  # one request: T and Tc say it all
SINGLE = ("R", "P", "N")  # dimensions that are 1


def lower(folder: Path, graph: Graph, form: str = FORM) -> Graph:
    """Write a lowered form of a portable graph beside it and return its manifest entry.

    Requires: `graph` is of form portable and lies in `folder`. Ensures: a drafter's step may write its block's rows
    behind the committed ones. BATCH_FORM: the same inputs and outputs; a request has one page, which every column of
    `pages` names, and one block row or more; the markers span all rows. FORM: dimensions SINGLE are 1, and the inputs
    DROPPED are gone.
    """
    model = ir.load(folder / graph.file)
    lower_model(model, form)
    file = graph.file.removesuffix(".onnx") + FORMS[form]
    ir.save(model, folder / file)
    lowered = replace(graph, form=form, file=file, cache_slack=1)
    if form == BATCH_FORM:
        return lowered
    inputs = tuple(replace(t, shape=_single(t.shape)) for t in graph.inputs if t.name not in DROPPED)
    outputs = tuple(replace(t, shape=_single(t.shape)) for t in graph.outputs)
    return replace(lowered, inputs=inputs, outputs=outputs)


def lower_model(model: ir.Model, form: str = FORM) -> None:
    """The passes of `lower`, in place."""
    if form == FORM:
        one_request(model.graph)
        lower_attention(model)
        lower_recurrent(model)
    else:  # recurrent layers keep their portable bodies, which visit the requests in turn
        lower_batch_attention(model)
    collapse_reshapes(model)
    remove_unused(model)
    merge_projections(model)
    remove_unused(model)
    if form == FORM:
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
