"""Run the scripted session through an exported graph on ONNX Runtime, as a runtime would: its caches grow.

Unused cache rows are filled with NaN, so that a graph which lets one of them into a result shows it; so are the states
of requests that have nothing committed.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime

from dspark.export.parity_script import Step, Turn

PAGE = 8  # rows; small, so that the portable graphs cross page borders
Arrays = dict[str, np.ndarray]


def replay(
    role: str, form: str, file: Path, steps: list[Step], threads: int | None = None, window: int = 0
) -> Iterator[tuple[Turn, Arrays]]:
    """Every turn with the outputs that the graph `file` gives it: names as in the graph, first axis rows or positions.

    role: target | drafter. form: `portable` runs all requests of a step in one call over shared, paged caches;
    `onnxruntime-cpu-batch` likewise over one page for each request, updated in place; `onnxruntime-cpu` one request at
    a time over a cache of its own, in place. threads: None takes one per core.
    window: the graph's largest; its caches are then rings as small as the session allows, which the portable form runs
    after the pages, in a second session.
    """
    rows = max(turn.length + len(turn.tokens) for step in steps for turn in step)
    feeds = target_feeds if role == "target" else drafter_feeds
    session = open_session(file, threads)
    ring = window + max(len(turn.tokens) for step in steps for turn in step) if window else 0
    if form == "portable":
        for size in (0, ring) if window else (0,):
            paged = _PagedCaches(session, rows, requests=len(steps[0]), ring=size)
            for step in steps:
                yield from _split(role, step, _run(paged, feeds, step, paged.pages))
        return
    capacity = rows + 3 * max(turn.block_rows for step in steps for turn in step)  # rows beyond: scratch of a draft
    if form == "onnxruntime-cpu-batch":
        shared = _LinearCaches(session, capacity, ring, requests=len(steps[0]))
        pages = np.arange(len(steps[0]), dtype=np.int32)[::-1, None]
        for step in steps:
            yield from _split(role, step, _run(shared, feeds, step, pages))
    else:
        linear = [_LinearCaches(session, capacity, ring) for _ in steps[0]]
        pages = np.zeros((len(steps[0]), 1), dtype=np.int32)
        for turn in (turn for step in steps for turn in step):
            yield from _split(role, [turn], _run(linear[turn.request], feeds, [turn], pages))


def _run(caches: "_Caches", feeds: Callable[[Step, np.ndarray], Arrays], step: Step, pages: np.ndarray) -> Arrays:
    """Run a step and commit what its turns keep. Where the states behind that are not given, that runs again alone."""
    outputs = caches.run(feeds(step, pages), step)
    if not caches.keep(step):
        kept = [committed_alone(turn) for turn in step]
        caches.run(feeds(kept, pages), kept)
        assert caches.keep(kept), "a graph gives the states after its last rows"
    return outputs


def committed_alone(turn: Turn) -> Turn:
    """The turn without the rows that it does not keep."""
    return replace(turn, tokens=turn.tokens[: turn.commit])


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
        "noise": np.stack([turn.noise for turn in step]),
        "temperature": np.array([turn.temperature for turn in step], dtype=np.float32),
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
    """A session with its cache inputs and outputs found by name; every cache is [P, Hkv, C, D] with ints Hkv and D.

    States of recurrent layers are [requests, ...]; the session gives those after the last rows [R, S, ...].
    """

    def __init__(
        self, session: onnxruntime.InferenceSession, pages: int, capacity: int, ring: int = 0, requests: int = 1
    ):
        """ring: rows of the caches whose rows are the dimension W; 0: as many as of the others."""
        self.session, self.requests = session, requests
        self.inputs = {node.name for node in session.get_inputs()}
        kept = ("_cache_out.", "_state_out.")
        self.outputs = [node.name for node in session.get_outputs() if not any(part in node.name for part in kept)]
        self.buffers: Arrays = {}
        self.states: Arrays = {}
        self.after: Arrays = {}  # what the last run gave as states, by the input that they are for
        for node in session.get_inputs():
            if "_state." in node.name:
                self.states[node.name] = np.full((requests, *node.shape[1:]), np.nan, dtype=np.float32)
            if "_cache." in node.name:
                _, kv_heads, dimension, head_dim = node.shape
                size = ring if ring and dimension == "W" else capacity
                self.buffers[node.name] = np.full((pages, kv_heads, size, head_dim), np.nan, dtype=np.float32)

    @staticmethod
    def updated(name: str) -> str:
        return name.replace("_cache.", "_cache_out.").replace("_state.", "_state_out.")

    def run(self, feeds: Arrays, step: Step) -> Arrays:
        raise NotImplementedError

    def states_of(self, step: Step) -> Arrays:
        """The states of the requests that take part in a step."""
        return {name: state[self.places(step)] for name, state in self.states.items()}

    def places(self, step: Step) -> list[int]:
        """Where the turns' requests have their states."""
        return [turn.request for turn in step]

    def keep(self, step: Step) -> bool:
        """Take over the states behind the rows that each turn commits; False: they were not given, nothing changed."""
        dropped = [len(turn.tokens) - turn.commit for turn in step]
        if any(max(dropped) >= after.shape[1] for after in self.after.values()):
            return False
        for name, after in self.after.items():
            for i, place in enumerate(self.places(step)):
                self.states[name][place] = after[i, after.shape[1] - 1 - dropped[i]]
        return True

    def feeds(self, feeds: Arrays) -> Arrays:
        """Without what this form of the graph does not ask for."""
        return {name: value for name, value in feeds.items() if name in self.inputs}


class _PagedCaches(_Caches):
    """All requests share pages, dealt out in an order that no mix-up of requests or pages survives. With rings, each
    has one page, which is named as often as its rows go around the ring."""

    def __init__(self, session: onnxruntime.InferenceSession, rows: int, requests: int, ring: int = 0):
        if ring:
            super().__init__(session, requests, rows, ring, requests)
            self.pages = np.arange(requests, dtype=np.int32)[::-1, None].repeat(-(-rows // ring), axis=1)
            return
        each = -(-rows // PAGE)
        super().__init__(session, pages=requests * each + 1, capacity=PAGE, requests=requests)
        dealt = np.random.default_rng(0).permutation(requests * each + 1)[: requests * each]
        self.pages = dealt.astype(np.int32).reshape(requests, each)

    def run(self, feeds: Arrays, step: Step) -> Arrays:
        names = [*self.outputs, *map(self.updated, self.buffers), *map(self.updated, self.states)]
        given = self.feeds(feeds) | self.buffers | self.states_of(step)
        results = dict(zip(names, self.session.run(names, given), strict=True))
        self.buffers = {name: results.pop(self.updated(name)) for name in self.buffers}
        self.after = {name: results.pop(self.updated(name)) for name in self.states}
        return results


class _LinearCaches(_Caches):
    """A page for each request; input and output of a cache are bound to one buffer, as the lowered graphs expect."""

    def __init__(self, session: onnxruntime.InferenceSession, capacity: int, ring: int = 0, requests: int = 1):
        super().__init__(session, requests, capacity, ring, requests)
        self.values = {n: onnxruntime.OrtValue.ortvalue_from_numpy(buffer) for n, buffer in self.buffers.items()}

    def places(self, step: Step) -> list[int]:
        return [0] if self.requests == 1 else super().places(step)

    def run(self, feeds: Arrays, step: Step) -> Arrays:
        binding = self.session.io_binding()
        for name, value in (self.feeds(feeds) | self.states_of(step)).items():
            binding.bind_cpu_input(name, np.ascontiguousarray(value))
        for name, cache in self.values.items():
            binding.bind_ortvalue_input(name, cache)
            binding.bind_ortvalue_output(self.updated(name), cache)
        names = [*self.outputs, *map(self.updated, self.states)]
        for name in names:
            binding.bind_output(name, "cpu")
        self.session.run_with_iobinding(binding)
        outputs = dict(zip(names, binding.get_outputs()[len(self.values) :], strict=True))
        results = {name: value.numpy() for name, value in outputs.items()}
        self.after = {name: results.pop(self.updated(name)) for name in self.states}
        return results
