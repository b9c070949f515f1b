"""What gpu_kernels.py measures, the floors of it in bytes, and the verdicts. No torch."""

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass

SHORT = 2  # bytes of a bf16 number
# What the kernels are held to: this share of the copy's bandwidth from so many requests on, and this much faster than
# the same chain in eager torch.
FLOOR_SHARE, FROM_REQUESTS, EAGER_SPEEDUP = 0.7, 8, 3.0


@dataclass(frozen=True)
class AttentionShape:
    """Requests of equal lengths on linear caches, Qwen3-4B's heads. fresh: new context rows, of a drafter's block."""

    requests: int
    block: int
    context: int
    causal: bool = True
    fresh: int = 0
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128

    def floor_bytes(self) -> int:
        """Every cached row read once, every row of q, k, v and of new context too, everything new written once."""
        kv_row = 2 * self.kv_heads * self.head_size * SHORT
        q_row = self.heads * self.head_size * SHORT
        block = 2 * q_row + (2 if self.causal else 1) * kv_row
        return self.requests * (kv_row * self.context + block * self.block + 2 * kv_row * self.fresh)

    def memory_bytes(self) -> int:
        """What the caches take, and half as much again for whatever torch needs beside them."""
        return self.requests * 2 * self.kv_heads * self.head_size * SHORT * (self.context + 64) * 3 // 2 + (1 << 28)


@dataclass(frozen=True)
class MarkovShape:
    requests: int
    head: str = "vanilla"
    gamma: int = 7
    vocab: int = 151_936
    hidden: int = 2560
    rank: int = 256

    def floor_bytes(self) -> int:
        """W2 once a step, the base logits once, and a head's weights (plugins/README.md); no logits are written."""
        per_step = self.vocab * self.rank * SHORT
        once = self.requests * self.gamma * self.vocab * SHORT
        if self.head == "gated":  # the part that h_k is multiplied with, and each step that of W1[prev]
            once, per_step = once + self.hidden * self.rank * SHORT, per_step + self.rank**2 * SHORT
        if self.head == "rnn":  # three of each, and the state's
            once, per_step = once + 3 * self.hidden * self.rank * SHORT, per_step + 6 * self.rank**2 * SHORT
        return self.gamma * per_step + once

    def memory_bytes(self) -> int:
        return 6 * self.vocab * self.rank * SHORT + 8 * self.requests * self.gamma * self.vocab * 4


@dataclass(frozen=True)
class AcceptShape:
    requests: int
    drawn: bool = False
    gamma: int = 7
    vocab: int = 151_936

    def floor_bytes(self) -> int:
        """The target's rows once; drawn: the draft's fp32 rows once, and both again where the request ended."""
        bytes_ = (self.gamma + 1) * self.vocab * SHORT
        if self.drawn:
            bytes_ += self.gamma * self.vocab * 4 + self.vocab * (SHORT + 4)
        return self.requests * bytes_

    def memory_bytes(self) -> int:
        return 12 * self.requests * (self.gamma + 1) * self.vocab * 4


Shape = AttentionShape | MarkovShape | AcceptShape
REQUESTS = (1, 2, 4, 8, 16, 32, 64)


def full_plan() -> dict[str, list]:
    """By what matters most, since the time may end before the plan does."""
    return {
        "markov_argmax": [
            *(MarkovShape(r) for r in REQUESTS),
            *(MarkovShape(r, head) for head in ("gated", "rnn") for r in (1, 8)),
        ],
        "block_attention": [
            *(AttentionShape(r, 8, context) for context in (2048, 8192, 512, 32768) for r in REQUESTS),
            *(AttentionShape(r, block, 2048) for block in (6, 7) for r in (1, 8)),
            *(AttentionShape(r, 7, context, causal=False, fresh=6) for context in (512, 8192) for r in (1, 8)),
        ],
        "accept": [AcceptShape(r, drawn) for drawn in (False, True) for r in REQUESTS],
    }


def tiny_plan() -> dict[str, list]:
    """For the host shim: every code path of the measuring, in seconds."""
    heads = {"heads": 4, "kv_heads": 2, "head_size": 64}
    sizes = {"gamma": 3, "vocab": 90, "hidden": 16, "rank": 16}
    return {
        "markov_argmax": [
            MarkovShape(2, **sizes), MarkovShape(9, **sizes), MarkovShape(1, "gated", **sizes),
            MarkovShape(2, "rnn", **sizes),
        ],
        "block_attention": [
            AttentionShape(2, 5, 70, **heads), AttentionShape(9, 3, 20, **heads),
            AttentionShape(2, 4, 40, causal=False, fresh=3, **heads),
        ],
        "accept": [AcceptShape(3, drawn, gamma=3, vocab=90) for drawn in (False, True)],
    }  # fmt: skip


def record(shape: Shape, times: Mapping[str, list[float]], **more) -> dict:
    """One measured configuration, as it is before the copy's bandwidth is known."""
    measured = {
        name: {"median_us": statistics.median(t), "min_us": min(t), "max_us": max(t), "samples": len(t)}
        for name, t in times.items()
    }
    return {"shape": asdict(shape), "floor_bytes": shape.floor_bytes(), "times": measured, **more}


def judge(report: dict) -> dict:
    """Fill in the floors, ratios and verdicts of a report (gpu_kernels.py), which may be of a part of the plan.

    The copy is measured several times, and its best counts, which is the strictest. A kernel's own time is that of its
    CUDA graph, since an engine launches it from one; `ratio_direct` is without.
    """
    best = max((copy["bytes_per_second"] for copy in report["copies"]), default=None)
    report["copy_bytes_per_second"] = best
    for rows in report["kernels"].values():
        for row in rows:
            if "times" not in row or best is None:
                continue
            medians = {name: time["median_us"] for name, time in row["times"].items()}
            row["floor_us"] = row["floor_bytes"] / best * 1e6
            row["ratio"] = row["floor_us"] / medians["kernel, graph"]
            row["ratio_direct"] = row["floor_us"] / medians["kernel"]
            row["times_faster_than"] = {
                name: median / medians["kernel, graph" if name.endswith(", graph") else "kernel"]
                for name, median in medians.items()
                if name.startswith("torch")
            }
    measured = {
        kernel: [row for row in rows if "ratio" in row and row["check"]["passed"]]
        for kernel, rows in report["kernels"].items()
    }

    def many(kernel: str) -> list[dict]:
        return [row for row in measured.get(kernel, ()) if row["shape"]["requests"] >= FROM_REQUESTS]

    floor = f"share of the copy's bandwidth, R >= {FROM_REQUESTS}"
    eager = [row for row in measured.get("markov_argmax", ()) if "torch, eager" in row["times"]]
    report["verdicts"] = {
        "markov_argmax": _verdict(floor, FLOOR_SHARE, many("markov_argmax"), lambda row: row["ratio"]),
        "block_attention": _verdict(floor, FLOOR_SHARE, many("block_attention"), lambda row: row["ratio"]),
        "markov_argmax, eager": _verdict(
            "times faster than the eager loop",
            EAGER_SPEEDUP,
            eager,
            lambda row: row["times_faster_than"]["torch, eager"],
        ),
    }
    return report


def _verdict(what: str, required: float, rows: Iterable[dict], value: Callable[[dict], float]) -> dict:
    found = sorted(((value(row), row["shape"]) for row in rows), key=lambda pair: pair[0])
    if not found:
        return {"what": what, "required": required, "met": None, "why": "not measured"}
    return {
        "what": what,
        "required": required,
        "met": found[0][0] >= required,
        "worst": found[0][0],
        "worst_at": found[0][1],
        "median": statistics.median(each for each, _ in found),
        "configurations": len(found),
        "below": [{"value": each, "shape": shape} for each, shape in found if each < required],
    }
