"""MarkovArgmax in plain ONNX ops: a Loop over the block's positions, so that gamma stays a dimension.

Noise is read behind an If: while every temperature is 0 a step costs what it costs without the input, and the noise may
be memory that nobody wrote.
"""

from collections.abc import Collection

import onnx_ir as ir
from onnxscript import build_function

from dspark.export.modules.ops import NAMESPACE

from .loops import branch, loop_body

INPUTS = (
    "base_logits", "anchors", "hidden", "w1", "w2", "head_weight", "head_bias", "confidence_weight", "confidence_bias",
    "d2t", "noise", "temperature",
)  # fmt: skip
OUTPUTS = ("tokens", "confidence", "logits")


def markov_argmax_function(opset: int, head: str, present: Collection[str], with_markov: bool) -> ir.Function:
    """The body for one head type and the inputs that the model's node really has (`present`, names of INPUTS)."""
    names = [name for name in INPUTS if name in present]
    kinds = {
        "inputs": "STRING",
        "outputs": "STRING",
        "head": "STRING",
        "confidence_with_markov": "INT",
        "plugin_namespace": "STRING",
        "plugin_version": "STRING",
    }
    return build_function(
        lambda op, *values: _body(op, head, with_markov, dict.fromkeys(INPUTS) | dict(zip(names, values, strict=True))),
        [ir.Value(name=name) for name in names],
        domain=NAMESPACE,
        name="MarkovArgmax",
        attributes={n: ir.Attr(n, ir.AttributeType[kind], None) for n, kind in kinds.items()},
        opset_imports={"": opset},
    )


def _body(op, head: str, with_markov: bool, given: dict[str, ir.Value | None]):
    as_float = ir.DataType.FLOAT
    base, hidden, anchors = op.Cast(given["base_logits"], to=as_float), given["hidden"], given["anchors"]
    w1 = given["w1"]
    # Transposed once, outside of the loop, where a backend folds it into the weight.
    w2, head_weight = (None if given[n] is None else op.Transpose(given[n], perm=[1, 0]) for n in ("w2", "head_weight"))
    noise, temperature = given["noise"], given["temperature"]
    drawn = None if noise is None else op.Greater(op.ReduceMax(temperature, keepdims=0), 0.0)

    def best(op, corrected, k):
        """The index [R] of each request's best score."""
        if noise is None:
            return op.ArgMax(corrected, axis=-1, keepdims=0)

        def draw(op):
            heat = op.Unsqueeze(temperature, [1])
            hot = op.Greater(heat, 0.0)
            score = op.Add(op.Div(corrected, heat), op.Gather(noise, k, axis=1))
            return op.ArgMax(op.Where(hot, score, corrected), axis=-1, keepdims=0)

        drawing = branch(op, "draw", draw, ["drawn"])
        greedy = branch(op, "greedy", lambda op: op.ArgMax(corrected, axis=-1, keepdims=0), ["best"])
        return op.If(drawn, then_branch=drawing, else_branch=greedy)

    def step(op, k, go_on, previous, state):
        corrected = op.Gather(base, k, axis=1)
        if head != "none":
            at, embedding = op.Gather(hidden, k, axis=1), op.Gather(w1, previous, axis=0)
            state, e = _head_step(op, head, state, embedding, at, head_weight, given["head_bias"])
            corrected = op.Add(corrected, op.Cast(op.MatMul(e, w2), to=as_float))
        drafted = best(op, corrected, k)
        if given["d2t"] is not None:
            drafted = op.Add(drafted, op.Gather(given["d2t"], drafted))
        return op.Identity(go_on), drafted, op.Identity(state), op.Identity(drafted), op.Identity(corrected)

    body = loop_body(op, "position", step, ["previous", "state"], ["token", "corrected"])
    gamma = op.Squeeze(op.Shape(base, start=1, end=2))
    start = _start_state(op, head, w1, anchors)
    true = op.Constant(value=ir.tensor(True))
    _, _, tokens, logits = op.Loop(gamma, true, anchors, start, body=body, _outputs=4)
    # A Loop stacks what its steps yield along a new first axis.
    tokens, logits = op.Transpose(tokens, perm=[1, 0]), op.Transpose(logits, perm=[1, 0, 2])
    return tokens, _confidence(op, given, with_markov, tokens), logits


def _confidence(op, given: dict[str, ir.Value | None], with_markov: bool, tokens: ir.Value) -> ir.Value:
    """c_k of all positions at once [R, G]: when the tokens are known, so are those before them."""
    as_float = ir.DataType.FLOAT
    if given["confidence_weight"] is None:
        return op.Cast(op.Equal(tokens, tokens), to=as_float)
    x = given["hidden"]
    if with_markov:
        previous = op.Concat(op.Unsqueeze(given["anchors"], [1]), op.Slice(tokens, [0], [-1], [1]), axis=1)
        x = op.Concat(x, op.Gather(given["w1"], previous, axis=0), axis=-1)
    logit = op.MatMul(op.Cast(x, to=as_float), op.Cast(given["confidence_weight"], to=as_float))
    if given["confidence_bias"] is not None:
        logit = op.Add(logit, op.Cast(given["confidence_bias"], to=as_float))
    return op.Sigmoid(logit)


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
