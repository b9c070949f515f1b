"""Run the scripted session through an exported graph on ONNX Runtime, as a runtime would: its caches grow.

Unused cache rows are filled with NaN, so that a graph which lets one of them into a result shows it.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime

from dspark.export.parity_script import Step, Turn

PAGE = 8  # rows; small, so that the portable graphs cross page borders
Arrays = dict[str, np.ndarray]


def replay(
    role: str, form: str, file: Path, steps: list[Step], threads: int | None = None
) -> Iterator[tuple[Turn, Arrays]]:
    """Every turn with the outputs that the graph `file` gives it: names as in the graph, first axis rows or positions.

    role: target | drafter. form: `portable` runs all requests of a step in one call over shared, paged caches;
    `onnxruntime-cpu` one request at a time over a cache that it updates in place. threads:
    None takes one per core.
    """
    rows = max(turn.length + len(turn.tokens) for step in steps for turn in step)
    feeds = target_feeds if role == "target" else drafter_feeds
    session = open_session(file, threads)
    if form == "portable":
        paged = _PagedCaches(session, rows, requests=len(steps[0]))
        for step in steps:
            yield from _split(role, step, paged.run(feeds(step, paged.pages)))
    else:
        capacity = rows + 3 * max(turn.block_rows for step in steps for turn in step)  # rows beyond: scratch of a draft
        linear = [_LinearCaches(session, capacity) for _ in steps[0]]
        for turn in (turn for step in steps for turn in step):
            yield from _split(role, [turn], linear[turn.request].run(feeds([turn], np.zeros((2, 1), dtype=np.int32))))


def open_session(file: Path, threads: int | None = None) -> onnxruntime.InferenceSession:
    """A session that takes no more memory than it must: weights stay mapped, none is copied into another layout."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # its errors reach us as exceptions; ours is the one line about them
    options.enable_cpu_mem_arena = False
    options.intra_op_num_threads = threads or 0
    options.add_session_config_entry("session.disable_prepacking", "1")
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def target_feeds(step: Step, pages: np.ndarray) -> Arrays:
    """The target's inputs for the turns of one step, flattened; pages int32 [requests, N]."""
    return {
        "tokens": np.concatenate([turn.tokens for turn in step]),
        "positions": np.concatenate([turn.length + np.arange(len(turn.tokens)) for turn in step]),
        "logit_rows": np.arange(sum(len(turn.tokens) for turn in step)),
        "row_start": _starts([len(turn.tokens) for turn in step]),
        **_committed(step, pages),
    }


def drafter_feeds(step: Step, pages: np.ndarray) -> Arrays:
    """The drafter's inputs: a block per turn, and the taps of the rows that the turn committed as new context."""
    blocks = [turn.block for turn in step]
    return {
        "tokens": np.stack(blocks),
        "positions": np.stack([turn.committed + np.arange(len(turn.block)) for turn in step]),
        "taps": np.concatenate([turn.context_taps for turn in step]),
        "context_positions": np.concatenate([turn.length + np.arange(turn.commit) for turn in step]),
        "row_start": _starts([len(block) for block in blocks]),
        "context_start": _starts([turn.commit for turn in step]),
        **_committed(step, pages),
    }


def _committed(step: Step, pages: np.ndarray) -> Arrays:
    lengths = np.array([turn.length for turn in step], dtype=np.int32)
    return {"length": lengths, "pages": pages[[turn.request for turn in step]]}


def _starts(counts: list[int]) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


def _split(role: str, step: Step, outputs: Arrays) -> Iterator[tuple[Turn, Arrays]]:
    """Give each turn its own rows of the outputs."""
    if role == "drafter":  # outputs are [R, G, ...]
        for i, turn in enumerate(step):
            yield turn, {name: value[i] for name, value in outputs.items()}
        return
    starts = _starts([len(turn.tokens) for turn in step])
    for turn, first, end in zip(step, starts, starts[1:], strict=False):
        yield turn, {name: value[first:end] for name, value in outputs.items()}


class _Caches:
    """A session with its cache inputs and outputs found by name; every cache is [P, Hkv, C, D] with ints Hkv and D."""

    def __init__(self, session: onnxruntime.InferenceSession, pages: int, capacity: int):
        self.session = session
        self.inputs = {node.name for node in session.get_inputs()}
        self.outputs = [node.name for node in session.get_outputs() if "_cache_out." not in node.name]
        self.buffers: Arrays = {}
        for node in session.get_inputs():
            if "_cache." in node.name:
                _, kv_heads, _, head_dim = node.shape
                self.buffers[node.name] = np.full((pages, kv_heads, capacity, head_dim), np.nan, dtype=np.float32)

    @staticmethod
    def updated(name: str) -> str:
        return name.replace("_cache.", "_cache_out.")

    def feeds(self, feeds: Arrays) -> Arrays:
        """Without what this form of the graph does not ask for."""
        return {name: value for name, value in feeds.items() if name in self.inputs}


class _PagedCaches(_Caches):
    """All requests share pages, dealt out in an order that no mix-up of requests or pages survives."""

    def __init__(self, session: onnxruntime.InferenceSession, rows: int, requests: int):
        each = -(-rows // PAGE)
        super().__init__(session, pages=requests * each + 1, capacity=PAGE)
        dealt = np.random.default_rng(0).permutation(requests * each + 1)[: requests * each]
        self.pages = dealt.astype(np.int32).reshape(requests, each)

    def run(self, feeds: Arrays) -> Arrays:
        names = [*self.outputs, *map(self.updated, self.buffers)]
        results = dict(zip(names, self.session.run(names, self.feeds(feeds) | self.buffers), strict=True))
        self.buffers = {name: results.pop(self.updated(name)) for name in self.buffers}
        return results


class _LinearCaches(_Caches):
    """One request; input and output of a cache are bound to one buffer, as the lowered graphs expect."""

    def __init__(self, session: onnxruntime.InferenceSession, capacity: int):
        super().__init__(session, pages=1, capacity=capacity)
        self.values = {n: onnxruntime.OrtValue.ortvalue_from_numpy(buffer) for n, buffer in self.buffers.items()}

    def run(self, feeds: Arrays) -> Arrays:
        binding = self.session.io_binding()
        for name, value in self.feeds(feeds).items():
            binding.bind_cpu_input(name, np.ascontiguousarray(value))
        for name, cache in self.values.items():
            binding.bind_ortvalue_input(name, cache)
            binding.bind_ortvalue_output(self.updated(name), cache)
        for name in self.outputs:
            binding.bind_output(name, "cpu")
        self.session.run_with_iobinding(binding)
        outputs = dict(zip(self.outputs, binding.get_outputs()[len(self.values) :], strict=True))
        return {name: value.numpy() for name, value in outputs.items()}
