"""BlockAttention in plain ONNX ops.

All appended rows go into the caches with one ScatterND each; then a Loop visits the requests, gathers the committed
rows of one of them and attends. Only rows that hold something are ever gathered, so whatever the unused ones contain
(NaN included) cannot reach a result, and nothing of the size of T x capacity exists.
"""

from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir
from onnxscript import build_function

from dspark.export.modules.ops import NAMESPACE

from .loops import loop_body

REQUIRED = ("q", "k", "v", "key_cache", "value_cache", "row_start", "length", "pages")
INPUTS = (*REQUIRED, "context_k", "context_v", "context_start", "sinks")


def block_attention_function(opset: int, present: Collection[str]) -> ir.Function:
    """The body for nodes with these inputs (names of INPUTS): with or without context rows, with or without sinks."""
    names = [name for name in INPUTS if name in present]
    kinds = {"causal": "INT", "window": "INT", "scale": "FLOAT", "softcap": "FLOAT", "inputs": "STRING"}
    kinds |= {"plugin_namespace": "STRING", "plugin_version": "STRING"}
    attributes = {n: ir.Attr(n, ir.AttributeType[kind], None) for n, kind in kinds.items()}
    return build_function(
        lambda op, *values: _body(op, **dict(zip(names, values, strict=True))),
        [ir.Value(name=name) for name in names],
        domain=NAMESPACE,
        name="BlockAttention",
        attributes=attributes,
        opset_imports={"": opset},
    )


@dataclass(frozen=True)
class Attributes:
    """The function's own attributes as scalars, made outside of the Loop: ONNX resolves no references inside of it."""

    causal: ir.Value  # bool
    unlimited: ir.Value  # bool: no window
    window: ir.Value
    scale: ir.Value
    capped: ir.Value  # bool
    softcap: ir.Value  # 1 where there is none

    @classmethod
    def of_function(cls, op) -> "Attributes":
        def scalar(name: str, field: str, kind: ir.AttributeType) -> ir.Value:
            return op.Constant(**{field: ir.RefAttr(field, name, kind)})

        causal, window = (scalar(name, "value_int", ir.AttributeType.INT) for name in ("causal", "window"))
        scale, softcap = (scalar(name, "value_float", ir.AttributeType.FLOAT) for name in ("scale", "softcap"))
        boolean = ir.DataType.BOOL
        capped = op.Cast(softcap, to=boolean)
        softcap = op.Where(capped, softcap, 1.0)
        unlimited = op.Equal(window, 0)
        return cls(op.Cast(causal, to=boolean), unlimited, window, scale, capped, softcap)


def _int64(op, x: ir.Value) -> ir.Value:
    return op.Cast(x, to=ir.DataType.INT64)


def _range(op, count: ir.Value) -> ir.Value:
    """0..count-1 for a scalar int64 count."""
    return op.Range(0, count, 1)


def _size(op, x: ir.Value, axis: int) -> ir.Value:
    """One dimension of x as a scalar."""
    return op.Squeeze(op.Shape(x, start=axis, end=axis + 1))


def _last(op, starts: ir.Value) -> ir.Value:
    return op.Gather(starts, -1)


def _cell_indices(op, page: ir.Value, row: ir.Value, heads: ir.Value) -> ir.Value:
    """Indices [n, Hkv, 3] of cache cells (page, head, row) for pages and rows [n]."""
    column, head = [1], op.Unsqueeze(_range(op, heads), [0])
    shape = op.Concat(op.Shape(page), op.Unsqueeze(heads, [0]), axis=0)
    parts = [op.Unsqueeze(page, column), head, op.Unsqueeze(row, column)]
    return op.Concat(*(op.Unsqueeze(op.Expand(part, shape), [-1]) for part in parts), axis=-1)


def _owners(op, starts: ir.Value) -> tuple[ir.Value, ir.Value]:
    """For rows 0..starts[-1]-1: the request [n] that each belongs to, and its index [n] within that request."""
    rows = _range(op, _last(op, starts))
    ends = op.Slice(starts, [1], op.Shape(starts), [0])
    started = op.GreaterOrEqual(op.Unsqueeze(rows, [1]), op.Unsqueeze(ends, [0]))
    owner = op.ReduceSum(_int64(op, started), [1], keepdims=0)
    return owner, op.Sub(rows, op.Gather(starts, owner))


def _append_rows(op, caches, rows, starts: ir.Value, at: ir.Value, pages: ir.Value, count: ir.Value | None = None):
    """Write rows [n, Hkv, D] of every request behind its `at` [R] rows; only the first `count` rows where given."""
    owner, index = _owners(op, starts)
    if count is not None:
        owner, index = (op.Slice(x, [0], op.Unsqueeze(count, [0]), [0]) for x in (owner, index))
    position = op.Add(op.Gather(at, owner), index)
    capacity = _size(op, caches[0], 2)
    table_row = op.Concat(*(op.Unsqueeze(x, [1]) for x in (owner, op.Div(position, capacity))), axis=1)
    indices = _cell_indices(op, op.GatherND(pages, table_row), op.Mod(position, capacity), _size(op, caches[0], 1))
    kept = op.Shape(owner)
    return [
        op.ScatterND(cache, indices, op.Slice(new, [0], kept, [0])) for cache, new in zip(caches, rows, strict=True)
    ]


def _body(
    op, q, k, v, key_cache, value_cache, row_start, length, pages,
    context_k=None, context_v=None, context_start=None, sinks=None,
):  # fmt: skip
    attributes = Attributes.of_function(op)
    starts, committed, pages = _int64(op, row_start), _int64(op, length), _int64(op, pages)
    caches = [key_cache, value_cache]
    if context_start is not None:
        context_starts = _int64(op, context_start)
        caches = _append_rows(op, caches, [context_k, context_v], context_starts, committed, pages)
        after, before = [1], op.Shape(context_starts)
        counts = op.Sub(op.Slice(context_starts, after, before, [0]), op.Slice(context_starts, [0], [-1], [0]))
        committed = op.Add(committed, counts)
    # Not causal: the block's rows never enter the cache, so none of them are written.
    written = op.Where(attributes.causal, _last(op, starts), 0)
    caches = _append_rows(op, caches, [k, v], starts, committed, pages, count=written)

    def request_body(op, request, condition, done):
        first, end = (op.Gather(starts, op.Add(request, n)) for n in (0, 1))
        block = [op.Slice(x, *(op.Unsqueeze(n, [0]) for n in (first, end)), [0]) for x in (q, k, v)]
        past = op.Gather(committed, request)
        out = _attend(op, attributes, *block, *caches, past, op.Gather(pages, request), sinks)
        return op.Identity(condition), op.Concat(done, out, axis=0)

    none = op.Slice(q, [0], [0], [0])
    true = op.Constant(value=ir.tensor(True))
    done = op.Loop(_size(op, committed, 0), true, none, body=loop_body(op, "request", request_body, ["done"]))
    padding = op.Sub(_size(op, q, 0), _last(op, starts))
    zeros = op.Expand(op.CastLike(0.0, q), _rows_like(op, padding, q))
    return op.Concat(done, zeros, axis=0), *caches


def _rows_like(op, rows: ir.Value, x: ir.Value) -> ir.Value:
    """The shape of x [n, ...] with `rows` rows."""
    return op.Concat(op.Unsqueeze(rows, [0]), op.Shape(x, start=1), axis=0)


def _attend(op, attributes: Attributes, q, k, v, key_cache, value_cache, past, pages, sinks):
    """One request: q [B, Hq, D] and k, v [B, Hkv, D] over `past` cached rows and the block -> [B, Hq, D]."""
    # Rows in front of every window are not gathered: in a ring newer ones lie in their places.
    reach = op.Sub(attributes.window, op.Where(attributes.causal, 1, 0))
    first = op.Where(attributes.unlimited, 0, op.Max(op.Sub(past, reach), 0))
    rows = op.Range(first, past, 1)
    capacity, kv_heads = _size(op, key_cache, 2), _size(op, key_cache, 1)
    page = op.Gather(pages, op.Div(rows, capacity))
    cells = _cell_indices(op, page, op.Mod(rows, capacity), kv_heads)
    as_float = ir.DataType.FLOAT
    keys, values = (
        op.Cast(op.Transpose(op.Concat(op.GatherND(cache, cells), new, axis=0), perm=[1, 0, 2]), to=as_float)
        for cache, new in ((key_cache, k), (value_cache, v))
    )  # [Hkv, n, D]
    # The queries of one kv head's group become rows of one matrix: [Hkv, g * B, D].
    block, depth = op.Shape(q, start=0, end=1), op.Shape(q, start=2, end=3)
    heads = op.Unsqueeze(kv_heads, [0])
    queries = op.Cast(op.Transpose(q, perm=[1, 0, 2]), to=as_float)
    # Every size is spelled out: a request without rows leaves nothing to infer a -1 from.
    grouped = op.Mul(op.Div(op.Shape(q, start=1, end=2), heads), block)
    queries = op.Reshape(queries, op.Concat(heads, grouped, depth, axis=0), allowzero=1)
    scores = op.Mul(op.MatMul(queries, op.Transpose(keys, perm=[0, 2, 1])), attributes.scale)
    softcap = attributes.softcap
    scores = op.Where(attributes.capped, op.Mul(op.Tanh(op.Div(scores, softcap)), softcap), scores)
    total = op.Shape(keys, start=1, end=2)
    by_head = op.Concat(op.Shape(q, start=1, end=2), block, total, axis=0)
    hidden = op.Constant(value_float=float("-inf"))
    scores = op.Where(
        _seen(op, attributes, first, past, block, total), op.Reshape(scores, by_head, allowzero=1), hidden
    )
    if sinks is not None:  # one more key, whose value is nothing
        column = op.Expand(op.Unsqueeze(sinks, [1, 2]), op.Concat(op.Shape(q, start=1, end=2), block, [1], axis=0))
        scores = op.Concat(scores, column, axis=-1)
    probabilities = op.Softmax(scores, axis=-1)
    if sinks is not None:
        probabilities = op.Slice(probabilities, [0], [-1], [2])
    probabilities = op.Reshape(probabilities, op.Concat(heads, grouped, total, axis=0), allowzero=1)
    out = op.Reshape(op.MatMul(probabilities, values), op.Shape(op.Transpose(q, perm=[1, 0, 2])), allowzero=1)
    return op.CastLike(op.Transpose(out, perm=[1, 0, 2]), q)


def _seen(op, attributes, first, past, block, total):
    """Which keys [n] each block row [B] sees: bool [B, n]. first: the first key's position."""
    key_at = op.Unsqueeze(op.Add(_range(op, op.Squeeze(total)), first), [0])
    query_at = op.Unsqueeze(op.Add(past, _range(op, op.Squeeze(block))), [1])
    window, causal = attributes.window, attributes.causal
    # The first key inside the window: own position - w + 1 in a causal block, Cr - w for the whole block otherwise.
    least = op.Where(causal, op.Add(op.Sub(query_at, window), 1), op.Sub(past, window))
    inside = op.Or(op.GreaterOrEqual(key_at, least), attributes.unlimited)
    return op.And(inside, op.Or(op.LessOrEqual(key_at, query_at), op.Not(causal)))
