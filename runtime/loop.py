"""One round: draft, schedule, verify, commit (DSpark, figure 2). Plain decoding is the round that drafts nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from dspark.runtime.commit import Kind, commit
from dspark.runtime.draft import UNSOUND, Draft, Drafter, DraftError
from dspark.runtime.schedule import Scheduler
from dspark.runtime.target import Target
from dspark.runtime.verify import Judge, verify


@dataclass(frozen=True)
class Rules:
    """What holds for every round of a generation."""

    draft_len: int
    scheduler: Scheduler
    judge: Judge  # chooses every token
    stops: frozenset[int]  # a draft is cut after the first of them; empty where stop tokens are ignored
    ends: Callable[[int], bool]  # told every token that is kept, in order; True: the text ends with it
    read_confidence: bool  # the scheduler wants the confidences, or a trace does
    stepwise: bool = False  # mode strict: the target runs one token at a time
    check: Callable[[], None] = lambda: None  # raises Cancelled


@dataclass(frozen=True)
class Round:
    """What one round did. Lengths are committed cache rows (before, after); times are milliseconds."""

    anchor: int
    position: int  # of the anchor; drafts follow it
    drafts: list[int]  # everything the drafter proposed; empty: nothing was drafted
    confidences: list[float] | None  # of the drafts, where they were read
    verified: int  # l: how many drafts the target was shown
    accepted: int  # n: how many of those were kept
    emitted: list[int]  # the accepted drafts, then the extra token unless a stop token was accepted
    commit: Kind
    target_steps: int  # forwards of the target: one, but for a replay
    target_length: tuple[int, int]
    drafter_length: tuple[int, int]
    draft_ms: float
    verify_ms: float
    total_ms: float
    engine_ms: float  # inside engine runs: the rest of total_ms is the host's own work
    failure: str | None = None  # why the drafter is of no more use to this generation; the output does not need it


def decode_round(
    target: Target,
    drafter: Drafter | None,
    anchor: int,
    budget: int,
    rules: Rules,
    index: int = 0,
    *,
    pause: bool = False,
) -> Round:
    """Emit at least one token after `anchor`, whose K/V is not in the target's cache yet.

    budget: the most drafts that may be verified, so that no limit is overrun; with 0 nothing is drafted. drafter None:
    plain decoding. index: of the round in its generation. pause: draft nothing, but keep the drafter's context whole.
    The round's state changes are complete when it returns: lengths, and taps handed to the drafter. A drafter that
    failed is not to be given back: the round says so, and goes on without drafts. Cancelled: nothing
    was decided, and the state is the one before, but for taps that the drafter has taken in.
    """
    started, before, steps = perf_counter(), _state(target, drafter), target.steps
    rules.check()

    proposal, failure = Draft([], None), None  # 1. draft
    if drafter is not None and budget > 0 and not pause and rules.scheduler.drafts():
        drawing = rules.judge.drafting(target.length + 1, rules.draft_len, index)
        draft_len, confidence = rules.draft_len, rules.read_confidence
        try:
            proposal = drafter.propose(anchor, draft_len=draft_len, read_confidence=confidence, **drawing)
        except DraftError as error:
            failure = str(error)
    drafted = perf_counter()

    length = 0  # 2. schedule
    if proposal.tokens:
        sure = None if proposal.confidence is None else proposal.confidence[None]
        most = np.array([min(len(proposal.tokens), budget)])
        (length,) = rules.scheduler.lengths(sure, most).tolist()
        # The cut looks at the drafts, so it is made when the length is chosen: no schedule may know of it before.
        length = min(length, usable(proposal, rules.stops))
        if proposal.sound < len(proposal.tokens):
            failure = UNSOUND

    rules.check()
    verify_started = perf_counter()  # 3. verify
    taps, judge, ends = drafter is not None, rules.judge, rules.ends
    verdict = verify(
        target, anchor, proposal, length, judge, ends, taps=taps, stepwise=rules.stepwise, check=rules.check
    )
    verified = perf_counter()

    kept = commit(target, verdict)  # 4. commit
    if drafter is not None and kept.taps is not None and failure is None:
        try:
            drafter.observe(kept.taps)
        except DraftError as error:
            failure = str(error)

    after = _state(target, drafter)
    return Round(
        anchor=anchor,
        position=before[0],
        drafts=proposal.tokens,
        confidences=None if proposal.confidence is None else proposal.confidence.tolist(),
        verified=verdict.verified,
        accepted=verdict.accepted,
        emitted=verdict.emitted(proposal),
        commit=kept.kind,
        target_steps=target.steps - steps,
        target_length=(before[0], after[0]),
        drafter_length=(before[1], after[1]),
        draft_ms=(drafted - started) * 1e3,
        verify_ms=(verified - verify_started) * 1e3,
        total_ms=(perf_counter() - started) * 1e3,
        engine_ms=(after[2] - before[2]) * 1e3,
        failure=failure,
    )


def usable(draft: Draft, stops: frozenset[int]) -> int:
    """How many drafts are left when the draft is cut after its first stop token, or before one that is not sound."""
    sound = draft.sound
    for index, token in enumerate(draft.tokens[:sound]):
        if token in stops:
            return index + 1
    return sound


def _state(target: Target, drafter: Drafter | None) -> tuple[int, int, float]:
    """(target length, drafter length, seconds inside engines so far)"""
    if drafter is None:
        return target.length, 0, target.engine.seconds
    return target.length, drafter.length, target.engine.seconds + drafter.engine.seconds
