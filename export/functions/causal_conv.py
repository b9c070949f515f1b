"""CausalConv in plain ONNX ops: every row's window is gathered, and the state is a window without its row."""

from collections.abc import Collection

import onnx_ir as ir
from onnxscript import build_function

from dspark.export.modules.ops import NAMESPACE

from .requests import block_of, for_each, kept_rows, recurrent_attributes, remembered

REQUIRED = ("x", "weight", "state", "row_start", "length")
INPUTS = (*REQUIRED, "bias")


def causal_conv_function(opset: int, present: Collection[str]) -> ir.Function:
    """The body for nodes with these inputs (names of INPUTS). Without row_start all rows are of one request."""
    names = [name for name in INPUTS if name in present]
    return build_function(
        lambda op, *values: _body(op, **dict(zip(names, values, strict=True))),
        [ir.Value(name=name) for name in names],
        domain=NAMESPACE,
        name="CausalConv",
        attributes=recurrent_attributes(),
        opset_imports={"": opset},
    )


def _body(op, x, weight, state, length, row_start=None, bias=None):
    kept = kept_rows(op, x)
    taps = op.Transpose(weight, perm=[1, 0])  # [K, C]
    if row_start is None:
        before = remembered(op, state, length, op.Constant(value_int=0))
        out, states = _convolve(op, x, taps, before, kept, bias)
        return out, op.Unsqueeze(states, [0])
    starts = op.Cast(row_start, to=ir.DataType.INT64)

    def one_request(op, request):
        rows = block_of(op, x, starts, request)
        return _convolve(op, rows, taps, remembered(op, state, length, request), kept, bias)

    return for_each(op, one_request, x, state, length, kept)


def _convolve(op, x, taps, before, kept, bias):
    """One request: x [n, C] after the rows `before` [K - 1, C] -> rows [n, C], the last states [kept, K - 1, C]."""
    as_float = ir.DataType.FLOAT
    width = op.Squeeze(op.Shape(taps, start=0, end=1))
    rows = op.Concat(before, x, axis=0)
    count = op.Squeeze(op.Shape(x, start=0, end=1))

    def windows(first, size):
        return op.Gather(rows, op.Add(op.Unsqueeze(first, [1]), op.Unsqueeze(op.Range(0, size, 1), [0])))

    seen = op.Cast(windows(op.Range(0, count, 1), width), to=as_float)  # [n, K, C]
    out = op.ReduceSum(op.Mul(seen, op.Cast(taps, to=as_float)), [1], keepdims=0)
    if bias is not None:
        out = op.Add(out, op.Cast(bias, to=as_float))
    # A request of fewer rows than are kept: the first of the states are the one before its rows.
    last = op.Max(op.Add(op.Sub(op.Add(count, 1), kept), op.Range(0, kept, 1)), 0)
    return op.CastLike(out, x), windows(last, op.Sub(width, 1))
