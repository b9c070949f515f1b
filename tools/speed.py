"""What `dspark profile` measures: how long the target takes for a step of B tokens, and the drafter for its drafts.

Every repetition runs each size once, in an order of its own, so that a slow minute of the machine falls on all sizes
alike; a figure is the median over the repetitions. Cost rises in steps, and where they are is what a scheduler wants to
know; what is not larger than the noise is no step (`even`).
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dspark.errors import UsageError
from dspark.manifest import CHUNK
from dspark.runtime import Decoder
from dspark.runtime.batch import PREFILL
from dspark.runtime.draft import Drafter, Drawing, propose_all
from dspark.runtime.target import Target, commit_all, forward_all

CONTEXT = 512  # committed tokens of a request, where the bundle takes as many,
ALL_CONTEXTS = 4096  # and of all requests together: they have to be run first, and their caches touched
REPEATS, BATCH_REPEATS = 30, 7
WARM_UP, BATCH_WARM_UP = 3, 1  # repetitions that do not count: memory is touched, kernels are chosen, graphs captured
FRESH = 2  # context rows that come with a proposal: about as many as a round commits
DENSE = 64  # up to this size of step every one is measured, and beyond it every THIN-th: that is where they are slow
THIN = 4
BESIDE = 16  # between sizes that only steps with prompts have


@dataclass(frozen=True)
class Point:
    """Milliseconds of one size: tokens in a step, or drafts in a proposal, or requests in one."""

    size: int
    ms: float  # median
    low: float  # a quarter of the repetitions was faster,
    high: float  # a quarter slower


@dataclass(frozen=True)
class Speed:
    steps: dict[int, list[Point]]  # of the target, by requests in a step, rising: by tokens
    drafts: list[Point]  # proposals of 1..block_size drafts for one request
    batch_drafts: list[Point]  # of the default draft length for 1, 2, .. requests at once; none on one-request engines


def default_context(decoder: Decoder) -> int:
    return max(1, min(CONTEXT, ALL_CONTEXTS // decoder.target_engine.requests, most_context(decoder)))


def default_repeats(requests: int) -> int:
    return REPEATS if requests == 1 else BATCH_REPEATS


def most_context(decoder: Decoder) -> int:
    """The longest context behind which the largest step can run, and rows for a proposal be observed."""
    requests, sizes = list(step_sizes(decoder).items())[-1]
    return decoder.context_limit - max(FRESH, -(-sizes[-1] // requests))


def step_sizes(decoder: Decoder) -> dict[int, list[int]]:
    """Tokens of the steps to measure, by requests: 1, 2, 4, .. and as many as there is room for. Up to a whole block
    for each, and in the fullest batch prompts beside them; down to what steps with fewer requests do not stand for: one
    token for each of a number of requests in between, and in the fullest batch one with a prompt beside it."""
    most, block = decoder.target_engine.requests, decoder.manifest.drafter.block_size + 1
    sizes, fewer = {}, 0
    for requests in (*(2**k for k in range((most - 1).bit_length())), most):
        first, last = 1 if requests == most else fewer + 1, requests * block
        thin = range(last, max(DENSE, first - 1), -THIN)  # the largest is among them
        sizes[requests] = sorted({*range(first, min(last, DENSE) + 1), requests, *thin})
        fewer = requests
    if most > 1:
        sizes[most] += range(most * block + BESIDE, most * block + PREFILL + 1, BESIDE)
    return sizes


def measure_speed(
    decoder: Decoder, context: int, repeats: int, progress: Callable[[int], None] = lambda done: None
) -> Speed:
    """Steps and proposals behind `context` committed tokens of each request that the engines have room for.

    A step of B tokens in so many requests is spread over them as evenly as it goes, one of fewer tokens over as many
    requests as these. progress: called with the number of repetitions that are done. UsageError: context or repeats out
    of range. The decoder's caches are used; sessions on it prefill theirs again.
    """
    most, requests = most_context(decoder), decoder.target_engine.requests
    if not 1 <= context <= most:
        raise UsageError(f"context {context}: this bundle can be profiled behind 1 to {most} tokens")
    if repeats < 1:
        raise UsageError(f"repeats {repeats}: must be at least 1")
    decoder.owner = None  # whoever had the caches loses them
    steps = _Steps(decoder, context)
    sizes = step_sizes(decoder)
    works = [(steps.verify, (requests, size)) for requests, each in sizes.items() for size in each]
    drafts = [(1, size) for size in range(1, decoder.manifest.drafter.block_size + 1)]
    batch_drafts = [(count, steps.draft_len) for count in range(1, requests + 1)] if requests > 1 else []
    works += [(steps.propose, size) for size in dict.fromkeys([*drafts, *batch_drafts])]
    times: dict[tuple, list[float]] = {work: [] for work in works}
    order, warm_up = random.Random(0), WARM_UP if requests == 1 else BATCH_WARM_UP
    for repeat in range(warm_up + repeats):
        for work in order.sample(works, len(works)):
            run, size = work
            milliseconds = run(*size)
            if repeat >= warm_up:
                times[work].append(milliseconds)
        if repeat >= warm_up:
            progress(repeat - warm_up + 1)
    return Speed(
        {r: [_point(size, times[steps.verify, (r, size)]) for size in each] for r, each in sizes.items()},
        [_point(size, times[steps.propose, (count, size)]) for count, size in drafts],
        [_point(count, times[steps.propose, (count, size)]) for count, size in batch_drafts],
    )


def _point(size: int, times: list[float]) -> Point:
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    return Point(size, middle, low, high)


def even(points: Sequence[Point]) -> list[float]:
    """Milliseconds by size: the shortest curve through the middle half of every size's measurements, a taut string.

    So noise makes no step in the cost, and a step that is larger than the noise stays at its place and, but for the
    noise, its height. No curve from the same start to the same end is shorter, and none turns from rising to falling
    or back less often (Davies and Kovac 2001, section 3). It starts at the first median. From each bend on it goes
    straight ahead as far as the quartiles let it, and from the last one to the point nearest to the last median that
    it can reach so.
    """
    sizes, lows, highs = ([getattr(p, name) for p in points] for name in ("size", "low", "high"))
    at, curve, last = 0, [points[0].ms], len(points) - 1
    while at < last:
        y, bend, up, down = curve[-1], None, math.inf, -math.inf  # slopes between which a straight line fits so far
        ceiling = floor = at  # where they come from
        for j in range(at + 1, last + 1):
            width = sizes[j] - sizes[at]
            highest, lowest = (highs[j] - y) / width, (lows[j] - y) / width
            if lowest > up:
                bend, end = ceiling, highs[ceiling]
                break
            if highest < down:
                bend, end = floor, lows[floor]
                break
            if highest <= up:
                up, ceiling = highest, j
            if lowest >= down:
                down, floor = lowest, j
        if bend is None:
            bend = last
            end = y + min(max((points[last].ms - y) / (sizes[last] - sizes[at]), down), up) * (sizes[last] - sizes[at])
        step = (end - y) / (sizes[bend] - sizes[at])
        curve += [y + step * (size - sizes[at]) for size in sizes[at + 1 : bend]] + [end]
        at = bend
    return curve


class _Steps:
    """Requests with a committed context, which every step leaves as it was."""

    def __init__(self, decoder: Decoder, context: int):
        spec, limit, count = decoder.manifest.drafter, decoder.context_limit, decoder.target_engine.requests
        self.targets = [Target(decoder.target_engine, limit, place) for place in range(count)]
        self.drafters = [Drafter(decoder.drafter_engine, spec, limit, place=place) for place in range(count)]
        self.block = spec.block_size + 1  # rows of a request whose logits are wanted, at most
        self.draft_len = decoder.manifest.profiles.draft_len
        # Which tokens they are does not change the work of a dense model.
        size = context + decoder.context_limit - most_context(decoder) + 1
        tokens = np.random.default_rng(0).integers(decoder.manifest.target.vocab_size, size=size)
        self.tokens, self.context = tokens.tolist(), context
        self.taps = [self._begin(*pair) for pair in zip(self.targets, self.drafters, strict=True)]

    def _begin(self, target: Target, drafter: Drafter):
        """The context enters both caches. Taps of the FRESH rows behind it, which stay in none."""
        for rows in self._chunks(target):
            forward = target.forward(rows, np.array([len(rows) - 1]))
            target.commit(len(rows))
            assert forward.taps is not None
            drafter.observe(forward.taps)
        forward = target.forward(self.tokens[self.context : self.context + FRESH], np.zeros(1, np.int64))
        target.commit(0)
        assert forward.taps is not None
        taps = forward.taps.copy()
        drafter.propose(self.tokens[self.context + FRESH], taps, 1)
        return taps

    def _chunks(self, target: Target) -> Iterator[list[int]]:
        chunk = min(CHUNK, target.engine.most_rows or CHUNK)
        for at in range(0, self.context, chunk):
            yield self.tokens[at : min(at + chunk, self.context)]

    def verify(self, requests: int, size: int) -> float:
        """Milliseconds of a step of `size` tokens in `requests`, as rounds run it: taps of all rows, and logits of
        those that can be an anchor or a draft; what a request brings beyond a block stands for a piece of a prompt."""
        share, more = divmod(size, requests)
        counts = [share + (place < more) for place in range(min(size, requests))]
        targets = self.targets[: len(counts)]
        tokens = [self.tokens[self.context : self.context + count] for count in counts]
        rows = [np.arange(max(0, count - self.block), count) for count in counts]
        began = time.perf_counter()
        forward_all(targets, tokens, rows)
        ended = time.perf_counter()
        commit_all(targets, [0] * len(targets))
        return (ended - began) * 1e3

    def propose(self, requests: int, size: int) -> float:
        """Milliseconds of a greedy proposal of `size` drafts with confidences, for each of so many requests."""
        drafters, anchors = self.drafters[:requests], [self.tokens[self.context + FRESH]] * requests
        for drafter in drafters:
            drafter.truncate(self.context)
        began = time.perf_counter()
        for drafter, taps in zip(drafters, self.taps, strict=False):
            drafter.observe(taps)
        propose_all(drafters, anchors, size, [Drawing()] * requests)
        return (time.perf_counter() - began) * 1e3
