"""BlockAttention of one request -> TensorScatter and com.microsoft.GroupQueryAttention.

TensorScatter appends the new rows to the caches; GroupQueryAttention then attends over the caches alone (it is given no
new keys). The kernel runs one matrix product per query head and packs the keys anew for each. So where the block is
small the query heads of one kv head are handed over as rows of one head: their keys are packed once, which is a third
faster with three heads in a group. It wants as many cached rows as query rows, which a short context does not have:
there, and in long blocks, the heads stay heads.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from dspark.export.rewriting import Nodes, constant_ints

MICROSOFT = "com.microsoft"
SMALL_BLOCK = 32  # rows up to which packing the keys outweighs the products


def lower_attention(model: ir.Model) -> None:
    """Requires: one request, linear caches. Ensures: no BlockAttention is left, neither nodes nor function."""
    graph = model.graph
    step: Step | None = None
    for node in [node for node in graph if node.op_type == "BlockAttention"]:
        at = Nodes(graph, node)
        step = step or Step.of(at, node)
        Attention(at, node, step).lower()
        graph.remove(node, safe=True)
    model.opset_imports[MICROSOFT] = 1
    model.functions.pop(("dspark", "BlockAttention", ""))


def _context(node: ir.Node) -> tuple[ir.Value | None, ir.Value | None]:
    return (node.inputs[8], node.inputs[9]) if len(node.inputs) > 8 else (None, None)


@dataclass
class Step:
    """What all layers share, computed once; int64 [1] where nothing else is said."""

    write_at: ir.Value  # where new rows go
    committed: ir.Value  # rows before the block, the new context's included
    rows: ir.Value  # of the block
    total: ir.Value  # rows in the cache after the step
    total32: ir.Value  # int32
    last: ir.Value  # int32: the last row's index
    biases: dict[Any, ir.Value]

    @classmethod
    def of(cls, at: Nodes, node: ir.Node) -> "Step":
        q, length, (context, _) = node.inputs[0], node.inputs[6], _context(node)
        rows = at.add("Shape", q, start=0, end=1)
        write_at = committed = at.add("Cast", length, to=ir.DataType.INT64)
        if context is not None:
            committed = at.add("Add", committed, at.add("Shape", context, start=0, end=1))
        total = at.add("Add", committed, rows)
        total32 = at.add("Cast", total, to=ir.DataType.INT32)
        last = at.add("Sub", total32, at.constant([1], ir.DataType.INT32))
        return cls(write_at, committed, rows, total, total32, last, {})

    def is_grouped(self, at: Nodes, group: int) -> ir.Value:
        """bool scalar: few rows, and enough cached ones for the kernel."""
        small = at.add("LessOrEqual", self.rows, at.constant([SMALL_BLOCK]))
        enough = at.add("LessOrEqual", at.add("Mul", self.rows, at.constant([group])), self.total)
        return at.add("Squeeze", at.add("And", small, enough))

    def bias(self, at: Nodes, dtype: ir.DataType, causal: bool, window: int, group: int) -> ir.Value:
        """What hides keys: -inf or 0, [1, 1, rows * group, total]; empty where a grouped form is not used."""
        key = (causal, window, group)
        if key in self.biases:
            return self.biases[key]
        zero, one, rows = at.constant(0), at.constant(1), self.rows
        if group > 1:
            rows = at.add("Mul", rows, at.add("Cast", self.is_grouped(at, group), to=ir.DataType.INT64))
        key_at = at.add("Range", zero, at.add("Squeeze", self.total), one)
        block_row = at.add("Range", zero, at.add("Squeeze", rows), one)
        position = at.add("Unsqueeze", at.add("Add", self.committed, block_row), at.constant([1]))
        first = (
            at.add("Sub", position, at.constant(window - 1))
            if causal
            else at.add("Sub", self.committed, at.constant(window))
        )
        hidden = [at.add("Less", key_at, first)] if window else []
        hidden += [at.add("Greater", key_at, position)] if causal else []
        mask = hidden[0] if len(hidden) == 1 else at.add("Or", *hidden)
        bias = at.add("Where", mask, at.constant(float("-inf"), dtype), at.constant(0.0, dtype))
        # Rows of the block, then the group's heads within each row: [rows, 1, total] -> [rows, group, total].
        shape = at.add("Concat", rows, at.constant([group]), self.total, axis=0)
        bias = at.add(
            "Expand",
            at.add("Unsqueeze", at.add("Expand", bias, at.add("Concat", rows, self.total, axis=0)), at.constant([1])),
            shape,
        )
        flat = at.add("Concat", at.constant([1, 1]), at.add("Mul", rows, at.constant([group])), self.total, axis=0)
        self.biases[key] = at.add("Reshape", bias, flat, allowzero=1)
        return self.biases[key]


class Attention:
    """One node's lowering."""

    def __init__(self, at: Nodes, node: ir.Node, step: Step):
        self.at, self.node, self.step = at, node, step
        q, key_cache = node.inputs[0], node.inputs[3]
        assert q is not None and q.shape is not None and key_cache is not None and key_cache.shape is not None
        self.q, self.dtype = q, q.dtype
        self.heads, self.kv_heads, self.depth = int(q.shape[1]), int(key_cache.shape[1]), int(q.shape[2])
        self.group = self.heads // self.kv_heads
        self.causal = bool(node.attributes["causal"].as_int())
        self.window = node.attributes["window"].as_int()
        self.options = {name: node.attributes[name].as_float() for name in ("scale", "softcap")}

    def lower(self) -> None:
        at, step = self.at, self.step
        _, k, v, key_cache, value_cache = self.node.inputs[:5]
        caches = [
            self.append(cache, new, context)
            for cache, new, context in zip((key_cache, value_cache), (k, v), _context(self.node), strict=True)
        ]
        # No new keys for the kernel: what it needs lies in the caches.
        nothing = at.constant(np.zeros((1, 0, self.kv_heads * self.depth), np.float32), self.dtype)
        self.sources = [nothing, nothing, *caches, step.last, step.total32]
        q = self.by_head(self.q)
        out = self.grouped_or_plain(q) if self.group > 1 else self.plain(at, q)
        for old, new in zip(self.node.outputs, (out, *caches), strict=True):
            at.replace(old, new)

    def append(self, cache: ir.Value, new: ir.Value, context: ir.Value | None) -> ir.Value:
        at = self.at
        rows = new if context is None else at.add("Concat", context, new, axis=0)
        return at.add("TensorScatter", cache, self.by_head(rows), self.step.write_at, axis=2)

    def by_head(self, x: ir.Value) -> ir.Value:
        """[T, heads, D] -> [1, heads, T, D]; mostly a form that the model had before it made the other."""
        transpose = x.producer()
        if (
            transpose is not None
            and transpose.op_type == "Transpose"
            and transpose.attributes["perm"].as_ints() == (1, 0, 2)
        ):
            gather = transpose.inputs[0].producer() if transpose.inputs[0] is not None else None
            if gather is not None and gather.op_type == "Gather" and constant_ints(gather.inputs[1]) == [0]:
                source = gather.inputs[0]
                if source is not None and source.shape is not None and len(source.shape) == 4 and source.shape[0] == 1:
                    return source
        at = self.at
        return at.add("Unsqueeze", at.add("Transpose", x, perm=[1, 0, 2]), at.constant([0]))

    def attend(self, at: Nodes, q: ir.Value, heads: int, causal: bool, bias: ir.Value | None) -> ir.Value:
        return at.add(
            "GroupQueryAttention", q, *self.sources, None, None, None, bias,
            domain=MICROSOFT, num_heads=heads, kv_num_heads=self.kv_heads, causal=int(causal),
            local_window_size=self.window if causal and self.window else -1, **self.options,
        )  # fmt: skip

    def plain(self, at: Nodes, q: ir.Value) -> ir.Value:
        """The heads stay heads; the kernel masks by itself but for the drafter's window. q [1, Hq, T, D]."""
        rows = at.reshape(at.add("Transpose", q, perm=[0, 2, 1, 3]), [1, -1, self.heads * self.depth])
        bias = self.bias(1) if self.window and not self.causal else None
        return at.reshape(self.attend(at, rows, self.heads, self.causal, bias), [-1, self.heads, self.depth])

    def grouped(self, at: Nodes, q: ir.Value) -> ir.Value:
        """q [1, Hkv * g, T, D] -> rows [1, T * g, Hkv * D] -> attention -> [T, Hkv * g, D]."""
        heads, group, depth = self.kv_heads, self.group, self.depth
        rows = at.add("Transpose", at.reshape(q, [heads, group, -1, depth]), perm=[2, 1, 0, 3])
        bias = self.bias(group) if self.window or self.causal else None
        out = self.attend(at, at.reshape(rows, [1, -1, heads * depth]), heads, False, bias)
        out = at.add("Transpose", at.reshape(out, [-1, group, heads, depth]), perm=[0, 2, 1, 3])
        return at.reshape(out, [-1, self.heads, depth])

    def bias(self, group: int) -> ir.Value:
        return self.step.bias(self.at, self.dtype, self.causal, self.window, group)

    def grouped_or_plain(self, q: ir.Value) -> ir.Value:
        branches = {}
        for name, form in (("then_branch", self.grouped), ("else_branch", self.plain)):
            graph = ir.Graph([], [], nodes=[], name=name)
            graph.outputs.append(form(Nodes(graph), q))
            branches[name] = graph
        return self.at.add("If", self.step.is_grouped(self.at, self.group), **branches)
