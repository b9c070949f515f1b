"""BlockAttention of many requests -> one ScatterND per cache, and a Scan over the requests around GroupQueryAttention.

The new rows of all requests go into a cache with one ScatterND, in place. A Scan then takes the requests in turn: its
body cuts a request's block out of the queries and its used rows out of the caches, and attends with the kernel's own
causal mask and window, so that nothing of the size of rows x keys is made outside of it. What a body gives has to have
one shape, so results are padded to the longest block, and gathered back into flat rows behind the Scan.

What a step's layers share is computed once: a Scan hands its body a row of each of these tables without a copy or a
node. Measured on two cores, 30 layers of 8 requests (9 heads of 64, 200 committed), in ms for 1 and 8 rows each: this
17 and 34; a Loop that collects results in a sequence 23 and 36; a Scan that carries them all 23 and 35; the one-request
form's attention, run 8 times, 23 and 38: so cutting the used rows out is no slower than reading them where they lie.
One node for all requests takes 15 for one row each, and the kernel refuses more rows.
"""

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from dspark.export.lowering.attention import MICROSOFT, replace_attention
from dspark.export.rewriting import Nodes, inputs_by_name

INT32, INT64 = ir.DataType.INT32, ir.DataType.INT64


def lower_batch_attention(model: ir.Model) -> None:
    """Requires: every request has one page, which all columns of `pages` name, and at least one block row; no rows of
    padding; caches as in `lower_attention`. Ensures: no BlockAttention is left, neither nodes nor function."""
    replace_attention(model, Step.of, _lower)


@dataclass(frozen=True)
class Rows:
    """The rows of all requests that one row marker tells apart; int64."""

    count: ir.Value  # [R]
    begin: ir.Value  # [R]
    end: ir.Value  # [R]
    owner: ir.Value  # [n]: each row's request
    index: ir.Value  # [n]: its number within the request

    @classmethod
    def of(cls, at: Nodes, starts: ir.Value) -> "Rows":
        """starts int64 [R + 1]"""
        zero, one = at.constant([0]), at.constant([1])
        begin = at.add("Slice", starts, zero, at.constant([-1]), zero)
        end = at.add("Slice", starts, one, at.constant([np.iinfo(np.int64).max]), zero)
        total = at.add("Gather", starts, at.constant(-1))
        # A row's request is the number of requests that end in front of it.
        ended = at.add("Expand", zero, at.add("Reshape", at.add("Add", total, at.constant(1)), one))
        ended = at.add("ScatterElements", ended, end, at.add("Expand", one, at.add("Shape", end)), reduction="add")
        owner = at.add("Slice", at.add("CumSum", ended, at.constant(0)), zero, at.constant([-1]), zero)
        row = at.add("Range", at.constant(0), total, at.constant(1))
        return cls(at.add("Sub", end, begin), begin, end, owner, at.add("Sub", row, at.add("Gather", begin, owner)))


@dataclass
class Step:
    """What all layers share, computed once; int64 [R] where nothing else is said."""

    page: ir.Value  # of each request
    rows: Rows  # of the blocks
    committed: ir.Value  # rows before the block, the new context's included
    total: ir.Value  # rows in the cache after the step
    write_page: ir.Value  # [n] for each new row: context rows, then block rows
    write_at: ir.Value  # [n]
    place: ir.Value  # [T]: of each block row in results that are padded to the longest block
    padding: ir.Value  # [R, 2]: rows of it in front of a request's results and behind them
    cells: dict[tuple[int, bool], ir.Value] = field(default_factory=dict)
    keys: dict[tuple[int, bool, int], "Keys"] = field(default_factory=dict)

    @classmethod
    def of(cls, at: Nodes, node: ir.Node) -> "Step":
        given = inputs_by_name(node)
        row_start, length, pages = (at.add("Cast", given[n], to=INT64) for n in ("row_start", "length", "pages"))
        page = at.add("Gather", pages, at.constant(0), axis=1)
        rows, committed = Rows.of(at, row_start), length
        owners, places = [rows.owner], []
        if "context_start" in given:
            context = Rows.of(at, at.add("Cast", given["context_start"], to=INT64))
            committed = at.add("Add", length, context.count)
            owners = [context.owner, rows.owner]
            places = [at.add("Add", at.add("Gather", length, context.owner), context.index)]
        places.append(at.add("Add", at.add("Gather", committed, rows.owner), rows.index))
        longest = at.add("ReduceMax", rows.count, keepdims=0)
        behind = at.add("Unsqueeze", at.add("Sub", longest, rows.count), at.constant([1]))
        return cls(
            page,
            rows,
            committed,
            at.add("Add", committed, rows.count),
            at.add("Gather", page, _joined(at, owners)),
            _joined(at, places),
            at.add("Add", at.add("Mul", rows.owner, longest), rows.index),
            at.add("Concat", at.add("Sub", behind, behind), behind, axis=1),
        )

    def cells_of(self, at: Nodes, cache: ir.Value, ring: bool) -> ir.Value:
        """Indices [n, Hkv, 3] of the cells that the new rows go to."""
        heads = _heads(cache)
        if (heads, ring) not in self.cells:
            row = at.add("Mod", self.write_at, at.add("Shape", cache, start=2, end=3)) if ring else self.write_at
            self.cells[heads, ring] = _cells(at, self.write_page, row, heads, head_axis=1)
        return self.cells[heads, ring]

    def keys_of(self, at: Nodes, cache: ir.Value, causal: bool, window: int) -> "Keys":
        kind = (_heads(cache), causal, window)
        if kind not in self.keys:
            self.keys[kind] = Keys.of(at, self, cache, causal, window)
        return self.keys[kind]


@dataclass(frozen=True)
class Keys:
    """The keys that layers of one kind attend over, for each request a row of every table."""

    begin: ir.Value  # int64 [R, 2]: page and row of the cache, or [R, 1]: of the cells below
    end: ir.Value  # likewise, behind the last one
    last: ir.Value  # int32 [R, 1]: their number - 1
    count: ir.Value  # int32 [R, 1]: their number
    cells: ir.Value | None  # int64 [1, Hkv, n, 3]: indices of those in rings, of all requests; None: no window

    @classmethod
    def of(cls, at: Nodes, step: Step, cache: ir.Value, causal: bool, window: int) -> "Keys":
        column = at.constant([1])
        if not window:
            first = at.add("Sub", step.page, step.page)
            ends = at.add("Add", step.page, at.constant(1)), step.total
            begin, end = (
                at.add("Concat", *(at.add("Unsqueeze", x, column) for x in pair), axis=1)
                for pair in ((step.page, first), ends)
            )
            return cls(begin, end, *_counts(at, step.total), None)
        # A causal row's window ends with the row itself; a draft's is the same for the whole block, and before it.
        reach = at.constant(window - 1 if causal else window)
        first = at.add("Max", at.add("Sub", step.committed, reach), at.constant(0))
        count = at.add("Sub", step.total, first)
        starts = at.add("Concat", at.constant([0]), at.add("CumSum", count, at.constant(0)), axis=0)
        keys = Rows.of(at, starts)
        row = at.add("Add", at.add("Gather", first, keys.owner), keys.index)
        row = at.add("Mod", row, at.add("Shape", cache, start=2, end=3))
        cells = _cells(at, at.add("Gather", step.page, keys.owner), row, _heads(cache), head_axis=0)
        cells = at.add("Unsqueeze", cells, at.constant([0]))
        begin, end = (at.add("Unsqueeze", x, column) for x in (keys.begin, keys.end))
        return cls(begin, end, *_counts(at, count), cells)


def _counts(at: Nodes, count: ir.Value) -> tuple[ir.Value, ir.Value]:
    """(count - 1, count) as int32 [R, 1]."""
    column = at.add("Cast", at.add("Unsqueeze", count, at.constant([1])), to=INT32)
    return at.add("Sub", column, at.constant(1, INT32)), column


def _joined(at: Nodes, parts: list[ir.Value]) -> ir.Value:
    return parts[0] if len(parts) == 1 else at.add("Concat", *parts, axis=0)


def _heads(cache: ir.Value) -> int:
    assert cache.shape is not None
    return int(cache.shape[1])


def _cells(at: Nodes, page: ir.Value, row: ir.Value, heads: int, head_axis: int) -> ir.Value:
    """Indices (page, head, row) of cache cells for pages and rows [n]: [n, Hkv, 3], with head_axis 0 [Hkv, n, 3]."""
    count, own = at.add("Shape", page), at.constant([heads])
    shape = at.add("Concat", *((own, count) if head_axis == 0 else (count, own)), axis=0)
    head = at.constant(np.arange(heads))
    parts = [(page, head_axis), (head, 1 - head_axis), (row, head_axis)]
    expanded = (at.add("Expand", at.add("Unsqueeze", x, at.constant([axis])), shape) for x, axis in parts)
    return at.add("Concat", *(at.add("Unsqueeze", x, at.constant([2])) for x in expanded), axis=-1)


def _lower(at: Nodes, node: ir.Node, step: Step) -> None:
    given = inputs_by_name(node)
    q, key_cache = given["q"], given["key_cache"]
    assert q is not None and q.shape is not None and key_cache is not None
    heads, depth = int(q.shape[1]), int(q.shape[2])
    causal, window = bool(node.attributes["causal"].as_int()), node.attributes["window"].as_int()
    keys = step.keys_of(at, key_cache, causal, window)
    caches = []
    for kind in ("key", "value"):
        cache, new, context = given[f"{kind}_cache"], given[kind[0]], given.get(f"context_{kind[0]}")
        assert cache is not None and new is not None
        rows = _joined(at, [new] if context is None else [context, new])
        caches.append(at.add("ScatterND", cache, step.cells_of(at, cache, bool(window)), rows))
    # With a scale of 1 the kernel takes a faster product for single rows: 5 to 10 % of a step that decodes.
    queries = at.add("Mul", q, at.constant(node.attributes["scale"].as_float(), q.dtype))
    queries = at.reshape(queries, [1, -1, heads * depth])
    nothing = at.constant(np.zeros((1, 0, _heads(key_cache) * depth), np.float32), q.dtype)
    sinks = given.get("sinks")

    def attend(body: Nodes, begin, end, key_begin, key_end, last, count, padding) -> ir.Value:
        """One request's results [1, longest, Hq * D]."""
        block = body.add("Slice", queries, begin, end, ones)
        if keys.cells is None:
            seen = [body.add("Slice", cache, key_begin, key_end, page_and_row) for cache in caches]
        else:
            cells = body.add("Slice", keys.cells, key_begin, key_end, twos)
            seen = [body.add("GatherND", cache, cells) for cache in caches]
        out = body.add(
            "GroupQueryAttention",
            *(block, nothing, nothing, *seen, last, count),
            *(() if sinks is None else (None, None, None, None, sinks)),
            domain=MICROSOFT,
            num_heads=heads,
            kv_num_heads=_heads(key_cache),
            causal=int(causal),
            local_window_size=window if causal and window else -1,
            scale=1.0,
            softcap=node.attributes["softcap"].as_float(),
        )
        return body.add("Pad", out, padding, None, ones)

    ones, twos, page_and_row = at.constant([1]), at.constant([2]), at.constant([0, 2])
    columns = [at.add("Unsqueeze", x, ones) for x in (step.rows.begin, step.rows.end)]
    tables = [*columns, keys.begin, keys.end, keys.last, keys.count, step.padding]
    padded = at.add("Scan", *tables, body=_body(attend, tables), num_scan_inputs=len(tables))
    out = at.add("Gather", at.reshape(padded, [-1, heads * depth]), step.place)
    for old, new in zip(node.outputs, (at.reshape(out, [-1, heads, depth]), *caches), strict=True):
        at.replace(old, new)


def _body(made, tables: list[ir.Value]) -> ir.Graph:
    """The body of a Scan over the rows of `tables`: made(nodes, *rows) -> its one result."""
    rows = [ir.Value(name=f"row_{i}") for i in range(len(tables))]
    graph = ir.Graph(rows, [], nodes=[], name="request")
    graph.outputs.append(made(Nodes(graph), *rows))
    return graph
