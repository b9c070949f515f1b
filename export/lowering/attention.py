"""BlockAttention of one request -> TensorScatter and com.microsoft.GroupQueryAttention.

TensorScatter appends the new rows to the caches; GroupQueryAttention then attends over the caches alone (it is given no
new keys). What a row may not see is hidden by a bias that all layers share: the kernel's own causal mask costs more
than adding it (610 against 540 us for 6 rows over 3,500 on two cores), and its window is for causal attention only.
"""

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from dspark.errors import UsageError
from dspark.export.rewriting import Nodes, constant_ints

MICROSOFT = "com.microsoft"


def check_head_dim(where: str, head_dim: int) -> None:
    """UsageError, beginning with `where`, for heads that GroupQueryAttention does not take."""
    if head_dim % 8:
        raise UsageError(f"{where}: head_dim {head_dim} is no multiple of 8, as ONNX Runtime's CPU attention needs it")


def lower_attention(model: ir.Model) -> None:
    """Requires: one request, linear caches. Ensures: no BlockAttention is left, neither nodes nor function."""
    graph = model.graph
    step: Step | None = None
    for node in [node for node in graph if node.op_type == "BlockAttention"]:
        at = Nodes(graph, node)
        step = step or Step.of(at, node)
        _lower(at, node, step)
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
    biases: dict[tuple[bool, int], ir.Value | None] = field(default_factory=dict)

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
        return cls(write_at, committed, rows, total, total32, last)

    def bias(self, at: Nodes, dtype: ir.DataType, causal: bool, window: int) -> ir.Value | None:
        """-inf where a row may not see a key, else 0: [1, 1, rows, total]. None where every row sees every key."""
        if (causal, window) not in self.biases:
            self.biases[causal, window] = self._bias(at, dtype, causal, window) if causal or window else None
        return self.biases[causal, window]

    def _bias(self, at: Nodes, dtype: ir.DataType, causal: bool, window: int) -> ir.Value:
        zero, one = at.constant(0), at.constant(1)
        key_at = at.add("Range", zero, at.add("Squeeze", self.total), one)
        block_row = at.add("Range", zero, at.add("Squeeze", self.rows), one)
        own = at.add("Unsqueeze", at.add("Add", self.committed, block_row), at.constant([1]))
        hidden = [at.add("Greater", key_at, own)] if causal else []
        if window:
            # A causal row's window ends with the row itself; a draft's is the same for the whole block, and before it.
            first = at.add(
                "Sub", *((own, at.constant(window - 1)) if causal else (self.committed, at.constant(window)))
            )
            hidden.append(at.add("Less", key_at, first))
        mask = at.add("Or", *hidden) if len(hidden) == 2 else hidden[0]
        bias = at.add("Where", mask, at.constant(float("-inf"), dtype), at.constant(0.0, dtype))
        return at.add("Expand", bias, at.add("Concat", at.constant([1, 1]), self.rows, self.total, axis=0))


def _lower(at: Nodes, node: ir.Node, step: Step) -> None:
    q, k, v, key_cache, value_cache = node.inputs[:5]
    assert q is not None and q.shape is not None and key_cache is not None and key_cache.shape is not None
    heads, kv_heads, depth = int(q.shape[1]), int(key_cache.shape[1]), int(q.shape[2])
    caches = []
    for cache, new, context in zip((key_cache, value_cache), (k, v), _context(node), strict=True):
        rows = new if context is None else at.add("Concat", context, new, axis=0)
        caches.append(at.add("TensorScatter", cache, _by_head(at, rows), step.write_at, axis=2))
    causal, window = bool(node.attributes["causal"].as_int()), node.attributes["window"].as_int()
    queries = at.reshape(at.add("Transpose", _by_head(at, q), perm=[0, 2, 1, 3]), [1, -1, heads * depth])
    nothing = at.constant(np.zeros((1, 0, kv_heads * depth), np.float32), q.dtype)
    out = at.add(
        "GroupQueryAttention",
        *(queries, nothing, nothing, *caches, step.last, step.total32),
        *(None, None, None, step.bias(at, q.dtype, causal, window)),
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
