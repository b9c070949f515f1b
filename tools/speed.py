"""What `dspark profile` measures: how long the target takes for a step of B tokens, and the drafter for k drafts.

Every repetition runs each size once, in an order of its own, so that a slow minute of the machine falls on all sizes
alike; a figure is the median over the repetitions. Nothing is smoothed or fitted: cost rises in steps, and where they
are is what a scheduler wants to know.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from dspark.errors import UsageError
from dspark.manifest import CHUNK
from dspark.runtime import Decoder
from dspark.runtime.draft import Drafter
from dspark.runtime.target import Target

CONTEXT = 512  # committed tokens, where the bundle takes as many
WARM_UP = 3  # repetitions that do not count: memory is touched, kernels are chosen, GPU graphs are captured
FRESH = 2  # context rows that come with a proposal: about as many as a round commits


@dataclass(frozen=True)
class Point:
    """Milliseconds of one size: tokens in a step, or drafts in a proposal."""

    size: int
    ms: float  # median
    low: float  # a quarter of the repetitions was faster,
    high: float  # a quarter slower

    @property
    def per_second(self) -> float:
        return 1e3 / self.ms


def default_context(decoder: Decoder) -> int:
    return min(CONTEXT, most_context(decoder))


def most_context(decoder: Decoder) -> int:
    """The longest context behind which a whole block can be verified, and rows for a proposal observed."""
    return decoder.context_limit - max(FRESH, decoder.manifest.drafter.block_size + 1)


def measure_speed(
    decoder: Decoder, context: int, repeats: int, progress: Callable[[int], None] = lambda done: None
) -> tuple[list[Point], list[Point]]:
    """(steps of 1..block_size + 1 tokens, proposals of 1..block_size drafts) behind `context` committed tokens.

    progress: called with the number of repetitions that are done. UsageError: context or repeats out of range. The
    decoder's caches are used; sessions on it prefill theirs again.
    """
    block_size, most = decoder.manifest.drafter.block_size, most_context(decoder)
    if not 1 <= context <= most:
        raise UsageError(f"context {context}: this bundle can be profiled behind 1 to {most} tokens")
    if repeats < 1:
        raise UsageError(f"repeats {repeats}: must be at least 1")
    decoder.owner = None  # whoever had the caches loses them
    steps = _Steps(decoder, context)
    works = [(steps.verify, size) for size in range(1, block_size + 2)]
    works += [(steps.propose, size) for size in range(1, block_size + 1)]
    times: dict[tuple, list[float]] = {work: [] for work in works}
    order = random.Random(0)
    for repeat in range(WARM_UP + repeats):
        for work in order.sample(works, len(works)):
            run, size = work
            milliseconds = run(size)
            if repeat >= WARM_UP:
                times[work].append(milliseconds)
        if repeat >= WARM_UP:
            progress(repeat - WARM_UP + 1)
    points = [_point(size, times[run, size]) for run, size in works]
    return points[: block_size + 1], points[block_size + 1 :]


def _point(size: int, times: list[float]) -> Point:
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    return Point(size, middle, low, high)


class _Steps:
    """A request with a committed context, which every step leaves as it was."""

    def __init__(self, decoder: Decoder, context: int):
        spec, limit = decoder.manifest.drafter, decoder.context_limit
        self.target = Target(decoder.target_engine, limit)
        self.drafter = Drafter(decoder.drafter_engine, spec, limit)
        # Which tokens they are does not change the work of a dense model.
        count = context + max(FRESH, spec.block_size) + 1
        tokens = np.random.default_rng(0).integers(decoder.manifest.target.vocab_size, size=count)
        self.tokens, self.context = tokens.tolist(), context
        for rows in self._chunks():
            forward = self.target.forward(rows, np.array([len(rows) - 1]))
            self.target.commit(len(rows))
            assert forward.taps is not None
            self.drafter.observe(forward.taps)
        forward = self.target.forward(self.tokens[context : context + FRESH], np.zeros(1, np.int64))
        self.target.commit(0)
        assert forward.taps is not None
        self.taps = forward.taps.copy()
        self.propose(1)  # the context enters the drafter's cache

    def _chunks(self) -> Iterator[list[int]]:
        chunk = min(CHUNK, self.target.engine.most_rows or CHUNK)
        for at in range(0, self.context, chunk):
            yield self.tokens[at : min(at + chunk, self.context)]

    def verify(self, size: int) -> float:
        """Milliseconds of a step of `size` tokens, as a round runs it: logits of all rows, and their taps."""
        rows = np.arange(size)
        began = time.perf_counter()
        self.target.forward(self.tokens[self.context : self.context + size], rows)
        ended = time.perf_counter()
        self.target.commit(0)
        return (ended - began) * 1e3

    def propose(self, size: int) -> float:
        """Milliseconds of a greedy proposal of `size` drafts with confidences."""
        self.drafter.truncate(self.context)
        began = time.perf_counter()
        self.drafter.propose(self.tokens[self.context + FRESH], self.taps, size)
        return (time.perf_counter() - began) * 1e3
