"""The custom ops' ONNX schemas, and how torch.onnx writes a call of theirs as one node."""

from collections.abc import Callable
from typing import Any

import onnx
import torch
from onnxscript import values

from dspark.export.functions import causal_conv, gated_delta
from dspark.export.functions.block_attention import INPUTS, REQUIRED
from dspark.export.functions.markov_argmax import INPUTS as MARKOV_INPUTS
from dspark.export.modules.ops import NAMESPACE, VERSION

Schema = onnx.defs.OpSchema
# TensorRT takes its plugin for a node, and not the node's function body, only where the node says so itself.
PLUGIN = {"plugin_namespace": NAMESPACE, "plugin_version": str(VERSION)}
_FLOATS = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
_KINDS = dict.fromkeys(("row_start", "length", "pages", "context_start"), "tensor(int32)")
_KINDS |= dict.fromkeys(("anchors", "d2t"), "tensor(int64)")
_KINDS |= dict.fromkeys(("sinks", "noise", "temperature"), "tensor(float)")
_REQUIRED = {*REQUIRED, "base_logits", "anchors", "hidden", *causal_conv.REQUIRED, *gated_delta.REQUIRED}


def _schema(
    name: str, inputs: tuple[str, ...], outputs: dict[str, str], attributes: dict[str, Schema.AttrType]
) -> Schema:
    def parameter(name: str, kind: str) -> Schema.FormalParameter:
        options = Schema.FormalParameterOption
        required = name in _REQUIRED or name in outputs
        return Schema.FormalParameter(name, kind, param_option=options.Single if required else options.Optional)

    return Schema(
        name,
        NAMESPACE,
        VERSION,
        inputs=[parameter(n, _KINDS.get(n, "T")) for n in inputs],
        outputs=[parameter(n, kind) for n, kind in outputs.items()],
        type_constraints=[("T", _FLOATS, "the graph's floating-point type")],
        attributes=[Schema.Attribute(n, kind, "") for n, kind in attributes.items()],
    )


_INT, _FLOAT, _STRING = Schema.AttrType.INT, Schema.AttrType.FLOAT, Schema.AttrType.STRING
_PLUGIN_KINDS = dict.fromkeys(PLUGIN, _STRING)
BLOCK_ATTENTION = _schema(
    "BlockAttention",
    INPUTS,
    {"out": "T", "key_cache_out": "T", "value_cache_out": "T"},
    {"causal": _INT, "window": _INT, "scale": _FLOAT, "softcap": _FLOAT} | _PLUGIN_KINDS,
)
MARKOV_ARGMAX = _schema(
    "MarkovArgmax",
    MARKOV_INPUTS,
    {"tokens": "tensor(int64)", "confidence": "tensor(float)", "logits": "tensor(float)"},
    {"head": _STRING, "confidence_with_markov": _INT} | _PLUGIN_KINDS,
)
_RECURRENT = {"out": "T", "states": "T"}, {"slots": _INT} | _PLUGIN_KINDS
CAUSAL_CONV = _schema("CausalConv", causal_conv.INPUTS, *_RECURRENT)
GATED_DELTA = _schema("GatedDelta", gated_delta.INPUTS, *_RECURRENT)


def translations() -> dict[Callable, Callable]:
    """torch.onnx's custom_translation_table for the ops."""
    domain = values.Opset(NAMESPACE, VERSION)
    attention = values.Op(domain, "BlockAttention", BLOCK_ATTENTION)
    markov = values.Op(domain, "MarkovArgmax", MARKOV_ARGMAX)
    convolution, delta = (values.Op(domain, schema.name, schema) for schema in (CAUSAL_CONV, GATED_DELTA))

    def ordered(names: tuple[str, ...], inputs: tuple, named: dict[str, Any]) -> list:
        """torch passes an optional input by name where one before it was left out."""
        given = [*inputs, *(named.get(name) for name in names[len(inputs) :])]
        while given[-1] is None:
            given.pop()
        return given

    def block_attention(*inputs: Any, causal: bool, window: int = 0, scale: float, softcap: float = 0.0, **named: Any):
        given = ordered(INPUTS, inputs, named)
        return attention(*given, causal=int(causal), window=window, scale=scale, softcap=softcap, **PLUGIN)

    def markov_argmax(*inputs: Any, head: str, confidence_with_markov: bool = False, **named: Any):
        given = ordered(MARKOV_INPUTS, inputs, named)
        return markov(*given, head=head, confidence_with_markov=int(confidence_with_markov), **PLUGIN)

    def convolve(*inputs: Any, slots: int, **named: Any):
        return convolution(*ordered(causal_conv.INPUTS, inputs, named), slots=slots, **PLUGIN)

    def gated(*inputs: Any, slots: int):
        return delta(*inputs, slots=slots, **PLUGIN)

    ops = torch.ops.dspark
    table = {ops.block_attention.default: block_attention, ops.markov_argmax.default: markov_argmax}
    return table | {ops.causal_conv.default: convolve, ops.gated_delta.default: gated}
