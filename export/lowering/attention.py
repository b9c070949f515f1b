"""BlockAttention of one request -> TensorScatter and com.microsoft.GroupQueryAttention.

TensorScatter appends the new rows to the caches; GroupQueryAttention then attends over the caches alone (it is given no
new keys). What a row may not see is hidden by a bias that all layers share: the kernel's own causal mask costs more
than adding it (610 against 540 us for 6 rows over 3,500 on two cores), and its window is for causal attention only.

A cache with a window may be a ring. TensorScatter goes around it, and the rows that the block's windows reach are
gathered before the attention: in their order, and without those that nobody may see, whatever is in them (a hidden NaN
would still spoil the products). Measured on two cores against attending over a ring of 512 more rows where it lies:
with a window of 128 it takes 0.3 of the time, with 512 0.4 to 0.65 (6 rows) or 0.6 to 0.8 (one row), with 4096 1.1 or
1.5.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from dspark.errors import UsageError
from dspark.export.rewriting import Nodes, constant_ints, inputs_by_name

MICROSOFT = "com.microsoft"
S = TypeVar("S")


def check_head_dim(where: str, head_dim: int) -> None:
    """UsageError, beginning with `where`, for heads that GroupQueryAttention does not take."""
    if head_dim % 8:
        raise UsageError(f"{where}: head_dim {head_dim} is no multiple of 8, as ONNX Runtime's CPU attention needs it")


def lower_attention(model: ir.Model) -> None:
    """Requires: one request; caches are linear, or those with a window rings of as many rows as the window and the
    step's new ones. Ensures: no BlockAttention is left, neither nodes nor function."""
    replace_attention(model, Step.of, _lower)


def replace_attention(
    model: ir.Model, begin: Callable[[Nodes, ir.Node], S], lower: Callable[[Nodes, ir.Node, S], None]
) -> None:
    """Put what `lower` makes of it in the place of every BlockAttention. begin: makes, in front of the first, what all
    of them share."""
    graph = model.graph
    step: S | None = None
    for node in [node for node in graph if node.op_type == "BlockAttention"]:
        at = Nodes(graph, node)
        step = step or begin(at, node)
        lower(at, node, step)
        graph.remove(node, safe=True)
    model.opset_imports[MICROSOFT] = 1
    model.functions.pop(("dspark", "BlockAttention", ""), None)  # a target may have no layer that attends


@dataclass(frozen=True)
class Keys:
    """The keys that layers of one kind attend over."""

    slots: ir.Value | None  # int64 [n]: the cache rows that hold them; None: all up to the last written one
    count: ir.Value  # int32 [1]: n
    last: ir.Value  # int32 [1]: n - 1
    bias: ir.Value | None  # [1, 1, rows, n]: -inf where a row may not see a key, else 0; None: every row sees every key


@dataclass
class Step:
    """What all layers share, computed once; int64 [1] where nothing else is said."""

    write_at: ir.Value  # where new rows go
    committed: ir.Value  # rows before the block, the new context's included
    rows: ir.Value  # of the block
    total: ir.Value  # rows in the cache after the step
    keys: dict[tuple[bool, int], Keys] = field(default_factory=dict)

    @classmethod
    def of(cls, at: Nodes, node: ir.Node) -> "Step":
        q, length, context = node.inputs[0], node.inputs[6], inputs_by_name(node).get("context_k")
        rows = at.add("Shape", q, start=0, end=1)
        write_at = committed = at.add("Cast", length, to=ir.DataType.INT64)
        if context is not None:
            committed = at.add("Add", committed, at.add("Shape", context, start=0, end=1))
        return cls(write_at, committed, rows, at.add("Add", committed, rows))

    def keys_of(self, at: Nodes, cache: ir.Value, causal: bool, window: int) -> Keys:
        """The keys of the layers with this window; all their caches have as many rows as this one."""
        if (causal, window) not in self.keys:
            self.keys[causal, window] = self._keys(at, cache, causal, window)
        return self.keys[causal, window]

    def _keys(self, at: Nodes, cache: ir.Value, causal: bool, window: int) -> Keys:
        zero, one = at.constant(0), at.constant(1)
        first, count = zero, self.total
        if window:
            # A causal row's window ends with the row itself; a draft's is the same for the whole block, and before it.
            reach = at.constant([window - 1 if causal else window])
            first = at.add("Squeeze", at.add("Max", at.add("Sub", self.committed, reach), at.constant([0])))
            count = at.add("Sub", self.total, first)
        key_at = at.add("Range", first, at.add("Squeeze", self.total), one) if causal or window else None
        bias = slots = None
        if causal:
            assert key_at is not None
            block_row = at.add("Range", zero, at.add("Squeeze", self.rows), one)
            own = at.add("Unsqueeze", at.add("Add", self.committed, block_row), at.constant([1]))
            hidden = at.add("Greater", key_at, own)
            if window:
                hidden = at.add("Or", hidden, at.add("Less", key_at, at.add("Sub", own, at.constant(window - 1))))
            dtype = cache.dtype
            assert dtype is not None
            bias = at.add("Where", hidden, at.constant(float("-inf"), dtype), at.constant(0.0, dtype))
            bias = at.add("Expand", bias, at.add("Concat", at.constant([1, 1]), self.rows, count, axis=0))
        if window:
            slots = at.add("Mod", key_at, at.add("Shape", cache, start=2, end=3))
        count = at.add("Cast", count, to=ir.DataType.INT32)
        return Keys(slots, count, at.add("Sub", count, at.constant([1], ir.DataType.INT32)), bias)


def _lower(at: Nodes, node: ir.Node, step: Step) -> None:
    q, k, v, key_cache, value_cache = node.inputs[:5]
    assert q is not None and q.shape is not None and key_cache is not None and key_cache.shape is not None
    heads, kv_heads, depth = int(q.shape[1]), int(key_cache.shape[1]), int(q.shape[2])
    given = inputs_by_name(node)
    contexts, sinks = [given.get(name) for name in ("context_k", "context_v")], given.get("sinks")
    causal, window = bool(node.attributes["causal"].as_int()), node.attributes["window"].as_int()
    keys, mode = step.keys_of(at, key_cache, causal, window), "circular" if window else "linear"
    caches = []
    for cache, new, context in zip((key_cache, value_cache), (k, v), contexts, strict=True):
        rows = new if context is None else at.add("Concat", context, new, axis=0)
        caches.append(at.add("TensorScatter", cache, _by_head(at, rows), step.write_at, axis=2, mode=mode))
    seen = caches if keys.slots is None else [at.add("Gather", cache, keys.slots, axis=2) for cache in caches]
    queries = at.reshape(at.add("Transpose", _by_head(at, q), perm=[0, 2, 1, 3]), [1, -1, heads * depth])
    nothing = at.constant(np.zeros((1, 0, kv_heads * depth), np.float32), q.dtype)
    out = at.add(
        "GroupQueryAttention",
        *(queries, nothing, nothing, *seen, keys.last, keys.count),
        *(None, None, None, keys.bias),
        *(() if sinks is None else (sinks,)),
        domain=MICROSOFT,
        num_heads=heads,
        kv_num_heads=kv_heads,
        causal=0,
        scale=node.attributes["scale"].as_float(),
        softcap=node.attributes["softcap"].as_float(),
    )
    for old, new in zip(node.outputs, (at.reshape(out, [-1, heads, depth]), *caches), strict=True):
        at.replace(old, new)


def _by_head(at: Nodes, x: ir.Value) -> ir.Value:
    """[T, heads, D] -> [1, heads, T, D]; where the model made x from just that, what it made it from."""
    match x.producer():
        case ir.Node(op_type="Transpose") as transpose if tuple(transpose.attributes["perm"].as_ints()) == (1, 0, 2):
            gather = transpose.inputs[0].producer() if transpose.inputs[0] is not None else None
            if gather is not None and gather.op_type == "Gather" and constant_ints(gather.inputs[1]) == [0]:
                source = gather.inputs[0]
                if source is not None and source.shape is not None and len(source.shape) == 4 and source.shape[0] == 1:
                    return source
    return at.add("Unsqueeze", at.add("Transpose", x, perm=[1, 0, 2]), at.constant([0]))
