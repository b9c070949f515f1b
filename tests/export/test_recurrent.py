"""The ops of recurrent layers, in torch and as ONNX function bodies, against the float64 reference."""

import functools

import numpy as np
import onnx_ir as ir
import pytest
import recurrent_reference as reference
import torch
from onnx.reference import ReferenceEvaluator
from single_node import session

from dspark.export.functions.causal_conv import causal_conv_function
from dspark.export.functions.gated_delta import gated_delta_function
from dspark.export.modules.recurrent import causal_conv, gated_delta
from dspark.export.onnx import IR_VERSION, OPSET
from dspark.export.schemas import PLUGIN

CASES = pytest.mark.parametrize("case", reference.CASES, ids=str)
OPS = pytest.mark.parametrize("kind", ["CausalConv", "GatedDelta"])
TORCH = {"CausalConv": causal_conv, "GatedDelta": gated_delta}
FUNCTIONS = {"CausalConv": causal_conv_function, "GatedDelta": gated_delta_function}
REFERENCE = {"CausalConv": reference.causal_conv, "GatedDelta": reference.gated_delta}


def arrays_of(kind, case, seed=0):
    return case.conv_inputs(seed) if kind == "CausalConv" else case.delta_inputs(seed)


def model_of(kind, arrays, slots):
    """One node whose inputs are the graph's, of unknown sizes."""
    return _model(kind, tuple((name, array.dtype, array.ndim) for name, array in arrays.items()), slots)


def run(kind, arrays, slots):
    """One session serves all cases with the same inputs, whatever their sizes."""
    return _session(kind, tuple((name, array.dtype, array.ndim) for name, array in arrays.items()), slots).run(
        None, arrays
    )


@functools.cache
def _session(kind, arrays, slots):
    return session(_model(kind, arrays, slots))


def _model(kind, arrays, slots):
    inputs = {
        name: ir.Value(
            name=name,
            type=ir.TensorType(ir.DataType.from_numpy(dtype)),
            shape=ir.Shape([f"{name}_{axis}" for axis in range(rank)]),
        )
        for name, dtype, rank in arrays
    }
    attributes = PLUGIN | {"slots": slots, "inputs": ",".join(inputs)}
    node = ir.node(kind, list(inputs.values()), attributes, domain="dspark", num_outputs=2)
    for output, name in zip(node.outputs, ("out", "states"), strict=True):
        output.name, output.type = name, ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(
        list(inputs.values()), node.outputs, nodes=[node], name=kind, opset_imports={"": OPSET, "dspark": 1}
    )
    return ir.Model(graph, ir_version=IR_VERSION, functions=[FUNCTIONS[kind](OPSET, inputs)])


def compare(found, expected):
    for name, ours, theirs in zip(("out", "states"), found, expected, strict=True):
        assert ours.shape == theirs.shape, name
        np.testing.assert_allclose(ours, theirs, atol=2e-6, rtol=1e-5, err_msg=name)


@OPS
@CASES
def test_torch_equals_reference(kind, case):
    arrays = arrays_of(kind, case)
    found = TORCH[kind](**{name: torch.from_numpy(a.copy()) for name, a in arrays.items()}, **case.attributes)
    compare([x.numpy() for x in found], REFERENCE[kind](**arrays, **case.attributes))


@OPS
@CASES
def test_function_equals_reference(kind, case):
    arrays = arrays_of(kind, case)
    compare(run(kind, arrays, case.slots), REFERENCE[kind](**arrays, **case.attributes))


@OPS
@pytest.mark.parametrize("case", [c for c in reference.CASES if c.single], ids=str)
def test_function_of_one_request_equals_reference(kind, case):
    arrays = arrays_of(kind, case)
    given = {name: array for name, array in arrays.items() if name != "row_start"}
    compare(run(kind, given, case.slots), REFERENCE[kind](**arrays, **case.attributes))


@OPS
@pytest.mark.parametrize("case", [c for c in reference.CASES if c.name in ("next chunk", "ragged", "padding")], ids=str)
def test_function_in_onnx_own_evaluator(kind, case):
    """The body is portable: it needs nothing that ONNX Runtime alone would do."""
    arrays = arrays_of(kind, case)
    found = ReferenceEvaluator(ir.to_proto(model_of(kind, arrays, case.slots))).run(None, arrays)
    compare(found, REFERENCE[kind](**arrays, **case.attributes))


@OPS
def test_fake_kernels_give_the_right_shapes(kind):
    case = next(c for c in reference.CASES if c.name == "ragged")
    given = {name: torch.from_numpy(array) for name, array in arrays_of(kind, case).items()}
    torch.library.opcheck(TORCH[kind], (), given | case.attributes, test_utils=("test_schema", "test_faketensor"))
