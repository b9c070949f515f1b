"""ONNX models of one custom op each, as the exporter writes them."""

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import onnxruntime

from dspark.export.functions import block_attention_function, markov_argmax_function
from dspark.export.functions.block_attention import INPUTS
from dspark.export.functions.markov_argmax import INPUTS as MARKOV_INPUTS
from dspark.export.onnx import IR_VERSION, OPSET
from dspark.export.plugin_nodes import name_inputs
from dspark.export.schemas import PLUGIN

OUTPUTS = {
    "BlockAttention": ("out", "key_cache_out", "value_cache_out"),
    "MarkovArgmax": ("tokens", "confidence", "logits"),
}
# The dimensions that stay what they are in a graph; the others are dynamic.
STATIC = {"q": (1, 2), "k": (1, 2), "v": (1, 2), "key_cache": (1, 3), "value_cache": (1, 3)}
STATIC |= {"context_k": (1, 2), "context_v": (1, 2)}


def single_node_model(kind: str, arrays: Mapping[str, np.ndarray], attributes: Mapping) -> ir.Model:
    """One node of `kind` whose inputs are the graph's; `arrays` says which there are, and their types."""
    names = INPUTS if kind == "BlockAttention" else MARKOV_INPUTS
    inputs = {name: _value(name, array) for name, array in arrays.items()}
    given = [inputs.get(name) for name in names]
    while given[-1] is None:
        given.pop()
    settings = {n: int(v) if isinstance(v, bool) else v for n, v in attributes.items()} | PLUGIN
    node = ir.node(kind, given, settings, domain="dspark", num_outputs=3)
    for output, name in zip(node.outputs, OUTPUTS[kind], strict=True):
        output.name = name
    if kind == "BlockAttention":
        function = block_attention_function(OPSET, arrays)
        shaped = dict(zip(node.outputs, ("q", "key_cache", "value_cache"), strict=True))
        for output, name in shaped.items():
            output.type, output.shape = inputs[name].type, inputs[name].shape
    else:
        head, with_markov = attributes["head"], bool(attributes["confidence_with_markov"])
        function = markov_argmax_function(OPSET, head, arrays, with_markov)
        node.outputs[0].type = ir.TensorType(ir.DataType.INT64)
        for output in node.outputs[1:]:
            output.type = ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(
        list(inputs.values()), node.outputs, nodes=[node], name=kind, opset_imports={"": OPSET, "dspark": 1}
    )
    model = ir.Model(graph, ir_version=IR_VERSION, functions=[function])
    name_inputs(model)
    return model


def _value(name: str, array: np.ndarray) -> ir.Value:
    static = STATIC.get(name, ())
    shape = [size if axis in static else f"{name}_{axis}" for axis, size in enumerate(array.shape)]
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.from_numpy(array.dtype)), shape=ir.Shape(shape))


def session(model: ir.Model) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    data = ir.to_proto(model).SerializeToString()
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
