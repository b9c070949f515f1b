"""What the bodies of the recurrent ops have in common: rows of requests, and how many of their states are kept."""

import onnx_ir as ir

from .loops import loop_body


def recurrent_attributes() -> dict[str, ir.Attr]:
    kinds = {"slots": "INT", "inputs": "STRING", "plugin_namespace": "STRING", "plugin_version": "STRING"}
    return {name: ir.Attr(name, ir.AttributeType[kind], None) for name, kind in kinds.items()}


def kept_rows(op, x: ir.Value) -> ir.Value:
    """S, a scalar: the smaller of the rows of x [T, ...] and the attribute `slots`."""
    slots = op.Constant(value_int=ir.RefAttr("value_int", "slots", ir.AttributeType.INT))
    return op.Min(op.Squeeze(op.Shape(x, start=0, end=1)), slots)


def remembered(op, state: ir.Value, length: ir.Value, request: ir.Value) -> ir.Value:
    """A request's state before its rows [...]: 0, whatever the input holds, where nothing is committed."""
    own = op.Gather(state, request)
    return op.Where(op.Greater(op.Gather(length, request), op.CastLike(0, length)), own, op.CastLike(0.0, own))


def for_each(op, one, x: ir.Value, state: ir.Value, length: ir.Value, kept: ir.Value) -> tuple[ir.Value, ir.Value]:
    """All requests in turn: one(op, request) -> (rows like those of x, states [kept, ...]).

    Gives rows like x, 0 in those that belong to no request, and states [R, kept, ...].
    """

    def request_body(op, request, condition, done):
        out, states = one(op, request)
        return op.Identity(condition), op.Concat(done, out, axis=0), op.Unsqueeze(states, [0])

    none, true = op.Slice(x, [0], [0], [0]), op.Constant(value=ir.tensor(True))
    body = loop_body(op, "request", request_body, ["done"], ["states"])
    done, states = op.Loop(op.Squeeze(op.Shape(length)), true, none, body=body, _outputs=2)
    shape = op.Concat(op.Shape(length), op.Unsqueeze(kept, [0]), op.Shape(state, start=1), axis=0)
    return pad_rows(op, done, x), op.Reshape(states, shape)


def stacked(op, steps: ir.Value, count: ir.Value, like: ir.Value) -> ir.Value:
    """What the steps of a Loop yielded, one [1, ...] each, as [count, ...] with the dimensions of like [n, ...].

    ONNX stacks yields along a new axis; its own reference evaluator joins them. After this both have done the same.
    """
    return op.Reshape(steps, op.Concat(op.Unsqueeze(count, [0]), op.Shape(like, start=1), axis=0))


def block_of(op, x: ir.Value, starts: ir.Value, request: ir.Value) -> ir.Value:
    """The rows of x [T, ...] that belong to a request."""
    first, end = (op.Unsqueeze(op.Gather(starts, op.Add(request, n)), [0]) for n in (0, 1))
    return op.Slice(x, first, end, [0])


def pad_rows(op, done: ir.Value, x: ir.Value) -> ir.Value:
    """`done` with rows of 0 behind it, as many rows as x has."""
    missing = op.Sub(op.Shape(x, start=0, end=1), op.Shape(done, start=0, end=1))
    shape = op.Concat(missing, op.Shape(done, start=1), axis=0)
    return op.Concat(done, op.Expand(op.CastLike(0.0, done), shape), axis=0)
