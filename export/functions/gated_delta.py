"""GatedDelta in plain ONNX ops, by chunks of rows instead of row by row.

Within a chunk a row's memory is the chunk's first one, decayed, and what the rows up to it have written:
M_t = e^{G_t} M + sum over i <= t of e^{G_t - G_i} k_i outer u_i, with G the running sum of g. What row t writes depends
on what those before it wrote, through one triangular system that all value columns share (the UT transform of DeltaNet,
arXiv 2406.06484; gated: arXiv 2412.06464). So the memory, the large part, is read once a chunk. The last rows, whose
states are kept, are a chunk of their own, and only for these a state per row is made.
"""

from collections.abc import Collection

import onnx_ir as ir
from onnxscript import build_function

from dspark.export.modules.ops import NAMESPACE

from .loops import branch, loop_body
from .requests import block_of, for_each, kept_rows, recurrent_attributes, remembered, stacked

INPUTS = ("q", "k", "v", "g", "beta", "state", "row_start", "length")
REQUIRED = INPUTS
CHUNK = 16  # rows


def gated_delta_function(opset: int, present: Collection[str] = INPUTS) -> ir.Function:
    """The body. `present`: without row_start all rows are of one request, and there is at least one."""
    names = [name for name in INPUTS if name in present]
    return build_function(
        lambda op, *values: _body(op, **dict(zip(names, values, strict=True))),
        [ir.Value(name=name) for name in names],
        domain=NAMESPACE,
        name="GatedDelta",
        attributes=recurrent_attributes(),
        opset_imports={"": opset},
    )


def _body(op, q, k, v, g, beta, state, length, row_start=None):
    kept, as_float = kept_rows(op, v), ir.DataType.FLOAT
    # A key head serves its group of value heads: [Hk, G, ..] everywhere, so that no head is repeated in memory.
    key_heads = op.Shape(k, start=1, end=2)
    grouped = op.Concat(key_heads, op.Div(op.Shape(v, start=1, end=2), key_heads), axis=0)

    def by_group(x):
        """[T, Hv, ..] -> [T, Hk, G, ..]"""
        shape = op.Concat(op.Shape(x, start=0, end=1), grouped, op.Shape(x, start=2), axis=0)
        return op.Reshape(op.Cast(x, to=as_float), shape)

    parts = [*(op.Cast(x, to=as_float) for x in (q, k)), *(by_group(x) for x in (v, g, beta))]
    by_head = op.Concat(grouped, op.Shape(state, start=2), axis=0)

    snapshots = op.Concat(op.Unsqueeze(kept, [0]), op.Shape(state, start=1), axis=0)

    def one_request(op, parts, request, shape):
        memory = op.Reshape(op.Cast(remembered(op, state, length, request), to=as_float), by_head)
        out, states = _run(op, parts, memory, kept, shape)
        rows = op.Concat(op.Shape(out, start=0, end=1), op.Shape(v, start=1), axis=0)
        return op.CastLike(op.Reshape(out, rows, allowzero=1), v), op.CastLike(states, state)

    if row_start is None:
        return one_request(op, parts, op.Constant(value_int=0), op.Concat([1], snapshots, axis=0))
    starts = op.Cast(row_start, to=ir.DataType.INT64)

    def one_of_many(op, request):
        return one_request(op, [block_of(op, x, starts, request) for x in parts], request, snapshots)

    return for_each(op, one_of_many, v, state, length, kept)


def _run(op, parts, memory, kept, snapshots):
    """One request's n rows from `memory` [Hk, G, Dk, Dv] on -> rows [n, Hk, G, Dv], the states of the last `kept` rows
    in the shape `snapshots`."""
    size, true = op.Constant(value_int=CHUNK), op.Constant(value=ir.tensor(True))
    count = op.Squeeze(op.Shape(parts[0], start=0, end=1))
    early = op.Max(op.Sub(count, kept), 0)  # rows whose states are not kept
    chunks = op.Div(op.Add(early, CHUNK - 1), size)
    # Rows of 0 in front neither decay nor write: with them there are whole chunks, and no fewer rows than are kept.
    missing = op.Unsqueeze(op.Sub(op.Add(op.Mul(chunks, size), kept), count), [0])
    parts = [op.Concat(op.Expand(0.0, op.Concat(missing, op.Shape(x, start=1), axis=0)), x, axis=0) for x in parts]

    def rows(op, first, length):
        ends = op.Unsqueeze(first, [0]), op.Unsqueeze(op.Add(first, length), [0])
        return [op.Slice(x, *ends, [0]) for x in parts]

    def many(op):
        def step(op, chunk, condition, memory):
            out, memory = _chunk(op, rows(op, op.Mul(chunk, size), size), memory)
            return op.Identity(condition), memory, op.Unsqueeze(out, [0])

        after, out = op.Loop(chunks, true, memory, body=loop_body(op, "early", step, ["memory"], ["out"]), _outputs=2)
        return after, stacked(op, out, op.Mul(chunks, size), parts[2])

    def few(op):
        return op.Identity(memory), op.Slice(parts[2], [0], [0], [0])

    # A Loop without a step would not know the shape of what its steps yield.
    some = [branch(op, name, made, ["memory", "rows"]) for name, made in (("many", many), ("few", few))]
    memory, done = op.If(op.Greater(chunks, 0), then_branch=some[0], else_branch=some[1], _outputs=2)
    last, states = _chunk(op, rows(op, op.Mul(chunks, size), kept), memory, snapshots)
    out = op.Concat(done, last, axis=0)
    return op.Slice(out, missing, op.Shape(out, start=0, end=1), [0]), states


def _chunk(op, rows, memory, snapshots=None):
    """L rows (q and k [L, Hk, Dk], v [L, Hk, G, Dv], g and beta [L, Hk, G]) -> out [L, Hk, G, Dv] and the memory after
    the last one [Hk, G, Dk, Dv], or after every one, in the shape `snapshots`."""
    q, k = (op.Unsqueeze(op.Transpose(x, perm=[1, 0, 2]), [1]) for x in rows[:2])  # [Hk, 1, L, Dk]
    v = op.Transpose(rows[2], perm=[1, 2, 0, 3])  # [Hk, G, L, Dv]
    total, beta = (op.Transpose(x, perm=[1, 2, 0]) for x in (op.CumSum(rows[3], 0), rows[4]))  # [Hk, G, L]
    decay, beta = (op.Unsqueeze(x, [3]) for x in (op.Exp(total), beta))
    number = op.Range(0, op.Squeeze(op.Shape(rows[0], start=0, end=1)), 1)
    row, column = op.Unsqueeze(number, [1]), op.Unsqueeze(number, [0])
    between = op.Sub(op.Unsqueeze(total, [3]), op.Unsqueeze(total, [2]))
    past = op.GreaterOrEqual(row, column)
    between = op.Exp(op.Where(past, between, op.Constant(value_float=float("-inf"))))  # [Hk, G, L, L]
    columns = op.Transpose(k, perm=[0, 1, 3, 2])
    known = op.Mul(op.Mul(op.MatMul(k, columns), between), beta)
    known = op.Where(op.Equal(row, column), 0.0, known)  # strictly lower
    wanted = op.Mul(op.Sub(v, op.Mul(op.MatMul(k, memory), decay)), beta)
    written = op.MatMul(_inverse(op, known, number), wanted)  # u [Hk, G, L, Dv]
    seen = op.MatMul(op.Mul(op.MatMul(q, columns), between), written)
    out = op.Transpose(op.Add(op.Mul(op.MatMul(q, memory), decay), seen), perm=[2, 0, 1, 3])
    if snapshots is not None:
        columns = op.Mul(columns, op.Unsqueeze(op.Transpose(between, perm=[2, 0, 1, 3]), [3]))  # [L, Hk, G, Dk, L]
        decay = op.Unsqueeze(op.Transpose(decay, perm=[2, 0, 1, 3]), [4])
    else:
        columns = op.Mul(columns, op.Slice(between, [-1], op.Shape(between, start=2, end=3), [2]))
        decay = op.Slice(decay, [-1], op.Shape(decay, start=2, end=3), [2])
    left, added = op.Mul(memory, decay), op.MatMul(columns, written)
    if snapshots is not None:  # shaped before they are summed: what would follow would be one more copy of them all
        left, added = op.Reshape(left, snapshots), op.Reshape(added, snapshots)
    return out, op.Add(left, added)


def _inverse(op, known, number):
    """(I + known) to the -1 for strictly lower matrices [.., L, L], row by row: a row needs those above it alone."""
    identity = op.CastLike(op.Equal(op.Unsqueeze(number, [1]), op.Unsqueeze(number, [0])), known)
    start = op.Expand(identity, op.Shape(known))

    def step(op, index, condition, solved):
        row = op.MatMul(op.Unsqueeze(op.Gather(known, index, axis=2), [2]), solved)
        place = op.Unsqueeze(op.Gather(identity, index), [1])
        return op.Identity(condition), op.Sub(solved, op.Mul(place, row))

    true = op.Constant(value=ir.tensor(True))
    return op.Loop(op.Size(number), true, start, body=loop_body(op, "row", step, ["solved"]))
