"""MarkovArgmax in plain ONNX ops: a Loop over the block's positions, so that gamma stays a dimension."""

import onnx_ir as ir
from onnxscript import build_function

from dspark.export.modules.ops import NAMESPACE

from .loops import loop_body

INPUTS = (
    "base_logits", "anchors", "hidden", "w1", "w2", "head_weight", "head_bias", "confidence_weight", "confidence_bias",
    "d2t",
)  # fmt: skip


def markov_argmax_function(opset: int, head: str, present: frozenset[str], with_markov: bool) -> ir.Function:
    """The body for one head type and the inputs that the model's node really has (`present`, names of INPUTS)."""
    inputs = [ir.Value(name=name) if name in present else None for name in INPUTS]
    kinds = {
        "head": "STRING",
        "confidence_with_markov": "INT",
        "plugin_namespace": "STRING",
        "plugin_version": "STRING",
    }
    return build_function(
        lambda op, *values: _body(op, head, with_markov, dict(zip(INPUTS, values, strict=True))),
        inputs,
        domain=NAMESPACE,
        name="MarkovArgmax",
        attributes={n: ir.Attr(n, ir.AttributeType[kind], None) for n, kind in kinds.items()},
        opset_imports={"": opset},
    )


def _body(op, head: str, with_markov: bool, given: dict[str, ir.Value | None]):
    as_float = ir.DataType.FLOAT
    base, hidden, anchors = op.Cast(given["base_logits"], to=as_float), given["hidden"], given["anchors"]
    # Transposed once, outside of the loop, where a backend folds it into the weight.
    w2, head_weight = (None if given[n] is None else op.Transpose(given[n], perm=[1, 0]) for n in ("w2", "head_weight"))
    confidence = given["confidence_weight"]
    if confidence is not None:
        confidence = op.Unsqueeze(op.Cast(confidence, to=as_float), [1])

    def step(op, k, go_on, previous, state):
        at = op.Gather(hidden, k, axis=1)
        embedding = None if given["w1"] is None else op.Gather(given["w1"], previous, axis=0)
        corrected = op.Gather(base, k, axis=1)
        if head != "none":
            state, e = _head_step(op, head, state, embedding, at, head_weight, given["head_bias"])
            corrected = op.Add(corrected, op.Cast(op.MatMul(e, w2), to=as_float))
        drafted = op.ArgMax(corrected, axis=-1, keepdims=0)
        if given["d2t"] is not None:
            drafted = op.Add(drafted, op.Gather(given["d2t"], drafted))
        if confidence is None:
            sure = op.CastLike(op.Equal(drafted, drafted), corrected)
        else:
            x = op.Concat(at, embedding, axis=-1) if with_markov else at
            logit = op.MatMul(op.Cast(x, to=as_float), confidence)
            if given["confidence_bias"] is not None:
                logit = op.Add(logit, op.Cast(given["confidence_bias"], to=as_float))
            sure = op.Squeeze(op.Sigmoid(logit), [1])
        state = op.Identity(state)
        return op.Identity(go_on), drafted, state, op.Identity(drafted), sure, op.Identity(corrected)

    body = loop_body(op, "position", step, ["previous", "state"], ["token", "sure", "corrected"])
    gamma = op.Squeeze(op.Shape(base, start=1, end=2))
    start = _start_state(op, head, given["w1"], anchors)
    true = op.Constant(value=ir.tensor(True))
    _, _, tokens, sures, logits = op.Loop(gamma, true, anchors, start, body=body, _outputs=5)
    # A Loop stacks what its steps yield along a new first axis.
    return (
        op.Transpose(tokens, perm=[1, 0]),
        op.Transpose(sures, perm=[1, 0]),
        op.Transpose(logits, perm=[1, 0, 2]),
    )


def _start_state(op, head: str, w1: ir.Value | None, anchors: ir.Value) -> ir.Value:
    """Zeros [R, r]; heads without a state carry an empty one, which costs nothing."""
    if head != "rnn":
        return op.Constant(value_floats=[0.0])
    shape = op.Concat(op.Shape(anchors), op.Shape(w1, start=1, end=2), axis=0)
    return op.Expand(op.CastLike(0.0, w1), shape)


def _head_step(op, head: str, state, embedding, hidden, weight, bias):
    """(state, W1[prev] [R, r], h_k [R, H]) -> (next state, e_k [R, r]); `weight` is transposed already."""
    if head == "vanilla":
        return state, embedding
    if head == "gated":
        gate = op.Add(op.MatMul(op.Concat(hidden, embedding, axis=-1), weight), bias)
        return state, op.Mul(op.Sigmoid(gate), embedding)
    joint = op.Add(op.MatMul(op.Concat(state, embedding, hidden, axis=-1), weight), bias)
    gate, candidate, output = op.Split(joint, num_outputs=3, axis=-1, _outputs=3)
    gate = op.Sigmoid(gate)
    kept = op.Mul(gate, state)
    return op.Add(kept, op.Mul(op.Sub(op.CastLike(1.0, gate), gate), op.Tanh(candidate))), op.Tanh(output)
