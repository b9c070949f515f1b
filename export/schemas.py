"""The custom ops' ONNX schemas, and how torch.onnx writes a call of theirs as one node."""

from collections.abc import Callable
from typing import Any

import onnx
import torch
from onnxscript import values

from dspark.export.functions.block_attention import CONTEXT, INPUTS
from dspark.export.functions.markov_argmax import INPUTS as MARKOV_INPUTS
from dspark.export.modules.ops import NAMESPACE, VERSION

Schema = onnx.defs.OpSchema
# TensorRT takes its plugin for a node, and not the node's function body, only where the node says so itself.
PLUGIN = {"plugin_namespace": NAMESPACE, "plugin_version": str(VERSION)}
_FLOATS = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
_INDICES = {"row_start": "tensor(int32)", "length": "tensor(int32)", "pages": "tensor(int32)"}
_INDICES |= {"context_start": "tensor(int32)", "anchors": "tensor(int64)", "d2t": "tensor(int64)"}
_REQUIRED = {*INPUTS, "base_logits", "anchors", "hidden"}


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
        inputs=[parameter(n, _INDICES.get(n, "T")) for n in inputs],
        outputs=[parameter(n, kind) for n, kind in outputs.items()],
        type_constraints=[("T", _FLOATS, "the graph's floating-point type")],
        attributes=[Schema.Attribute(n, kind, "") for n, kind in attributes.items()],
    )


_INT, _FLOAT, _STRING = Schema.AttrType.INT, Schema.AttrType.FLOAT, Schema.AttrType.STRING
_PLUGIN_KINDS = dict.fromkeys(PLUGIN, _STRING)
BLOCK_ATTENTION = _schema(
    "BlockAttention",
    INPUTS + CONTEXT,
    {"out": "T", "key_cache_out": "T", "value_cache_out": "T"},
    {"causal": _INT, "window": _INT, "scale": _FLOAT, "softcap": _FLOAT} | _PLUGIN_KINDS,
)
MARKOV_ARGMAX = _schema(
    "MarkovArgmax",
    MARKOV_INPUTS,
    {"tokens": "tensor(int64)", "confidence": "tensor(float)", "logits": "tensor(float)"},
    {"head": _STRING, "confidence_with_markov": _INT} | _PLUGIN_KINDS,
)


def translations() -> dict[Callable, Callable]:
    """torch.onnx's custom_translation_table for the two ops."""
    domain = values.Opset(NAMESPACE, VERSION)
    attention = values.Op(domain, "BlockAttention", BLOCK_ATTENTION)
    markov = values.Op(domain, "MarkovArgmax", MARKOV_ARGMAX)

    def block_attention(*inputs: Any, causal: bool, window: int = 0, scale: float, softcap: float = 0.0):
        return attention(*inputs, causal=int(causal), window=window, scale=scale, softcap=softcap, **PLUGIN)

    def markov_argmax(*inputs: Any, head: str, confidence_with_markov: bool = False, **named: Any):
        # torch passes an optional input by name where one before it was left out.
        given = [*inputs, *(named.get(name) for name in MARKOV_INPUTS[len(inputs) :])]
        while given[-1] is None:
            given.pop()
        return markov(*given, head=head, confidence_with_markov=int(confidence_with_markov), **PLUGIN)

    ops = torch.ops.dspark
    return {ops.block_attention.default: block_attention, ops.markov_argmax.default: markov_argmax}
