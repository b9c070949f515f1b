"""Many requests at once on one pair of engines: every step drafts, schedules, verifies and commits for all of them.

A step is one run of the drafter and one of the target, both ragged: a request that decodes brings its anchor and as
many drafts as the scheduler gives it, one that still reads its prompt brings a piece of that. What a request returns
does not depend on the others, but for rounding.
"""

import contextlib
import heapq
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Self

import numpy as np

from dspark.errors import DSparkError, UsageError
from dspark.manifest import CHUNK
from dspark.runtime.commit import Kind, replay
from dspark.runtime.counters import Counters
from dspark.runtime.draft import UNSOUND, Draft, Drafter, DraftError, Drawing, propose_all
from dspark.runtime.engines.base import Rows
from dspark.runtime.loop import Round, usable
from dspark.runtime.request import Answer, Chunk, Generation, Options, Prompt, check_number, draft_len_of, log
from dspark.runtime.schedule import Scheduler, check_rule
from dspark.runtime.target import Forward, Target, commit_all, forward_all
from dspark.runtime.throughput import Throughput
from dspark.runtime.verify import Verdict, decide

if TYPE_CHECKING:
    from dspark.runtime.decoder import Decoder

PREFILL = 64  # prompt tokens in a step in which others decode: they wait for about as long as for a few steps
QUEUE = 256


class QueueFull(DSparkError):
    """The batch takes no more requests for now."""


class Request:
    """A request of a batch. Iterating over it gives its chunks, and steps the batch where none has come yet."""

    def __init__(
        self,
        batch: "Batch",
        number: int,
        prompt: list[int],
        answer: Answer,
        deadline: float | None,
        deliver: Callable[[Chunk], None] | None,
    ):
        """deadline: on the clock of time.monotonic; None: none. deliver: see `Batch.submit`."""
        self.number = number
        self.prompt = prompt
        self.answer = answer
        self.generation: Generation | None = None  # once it has ended
        self._batch = batch
        self._deliver = deliver
        self._deadline = deadline
        self._cancelled = False
        self._chunks: deque[Chunk] = deque()

    def cancel(self) -> None:
        """End it, from any thread: before its next step, or in a running one before that decides anything. The
        generation has what was returned so far."""
        self._cancelled = True

    def __iter__(self) -> Iterator[Chunk]:
        while True:
            ended = self.generation is not None  # looked up first: another thread may step
            if self._chunks:
                yield self._chunks.popleft()
            elif ended:
                return
            elif not self._batch.step() and not self._chunks and self.generation is None:
                raise DSparkError("the batch does not know this request any more")

    def result(self) -> Generation:
        """Step the batch until this request has ended. Its chunks are gone then."""
        for _ in self:
            pass
        assert self.generation is not None
        return self.generation

    def expired(self) -> str | None:
        """The reason to end it now."""
        if self._cancelled:
            return "cancelled"
        return "deadline" if self._deadline is not None and monotonic() >= self._deadline else None

    def give(self, chunk: Chunk) -> None:
        if self._deliver is None:
            self._chunks.append(chunk)
        self.generation = chunk.generation
        if self._deliver is not None:
            try:
                self._deliver(chunk)
            except Exception as error:  # of one reader, which is no matter of the others'
                log.warning("request %d: its chunks cannot be delivered (%s); it ends", self.number, error)
                self.cancel()

    @property
    def stream(self) -> tuple[int | None, int]:
        """What keys its random numbers."""
        return self.answer.seed, self.answer.options.request


class _Running:
    """A request that has a place in the engines, which its caches are in."""

    def __init__(self, request: Request, decoder: "Decoder", place: int):
        limit, self.request, self.answer, self.place = decoder.context_limit, request, request.answer, place
        self.target = Target(decoder.target_engine, limit, place)
        self.drafter: Drafter | None = None
        if self.answer.options.mode != "plain":
            self.drafter = Drafter(decoder.drafter_engine, decoder.manifest.drafter, limit, place=place)
        self.unread = list(request.prompt)  # tokens of the prompt that the target has not run
        self.anchor = 0  # once the prompt is read: the last token returned
        self.answer.resume()

    def drawing(self, draft_len: int) -> dict:
        """How its next drafts are to be drawn."""
        return self.answer.rules.judge.drafting(self.target.length + 1, draft_len, self.answer.stats.rounds)

    @property
    def lengths(self) -> tuple[int, int]:
        """Rows in the target's and in the drafter's cache."""
        return self.target.length, 0 if self.drafter is None else self.drafter.length


@dataclass
class _Part:
    """A request in a step: a piece of its prompt, or its anchor and what was drafted behind that."""

    running: _Running
    rows: list[int]  # its tokens in the target's forward
    before: tuple[int, int]  # rows in the target's and the drafter's cache
    steps: int  # forwards of the target so far
    draft: Draft | None = None  # None: it reads its prompt
    paused: bool = False
    failure: str | None = None  # of the drafter
    verdict: Verdict | None = None  # on the draft
    new: list[int] = field(default_factory=list)  # tokens that it returns

    @classmethod
    def of(cls, running: _Running, rows: list[int], draft: Draft | None = None) -> Self:
        return cls(running, rows, running.lengths, running.target.steps, draft)

    @property
    def logit_rows(self) -> np.ndarray:
        return np.array([len(self.rows) - 1]) if self.draft is None else np.arange(len(self.rows))

    def fail(self, failure: str) -> None:
        """The drafter is of no more use to this request."""
        self.failure, self.running.drafter = failure, None


class Batch:
    """Requests on a decoder's engines: so many run as there are places, others wait in the order in which they came.

    Any thread may call anything; one at a time steps.
    """

    def __init__(
        self,
        decoder: "Decoder",
        scheduler: Scheduler,
        *,
        draft_len: int | None = None,
        max_queue: int = QUEUE,
        prefill: int = PREFILL,
    ):
        """scheduler: of all requests together. draft_len: drafts per round; None: the bundle's default. max_queue:
        requests that may wait. prefill: prompt tokens in a step in which others decode."""
        for name, value, least in (("max queue", max_queue, 0), ("prefill", prefill, 1)):
            check_number(name, value)
            if value < least:
                raise UsageError(f"{name} {value}: must be at least {least}")
        self.decoder = decoder
        self.scheduler = scheduler
        self.draft_len = draft_len_of(decoder, draft_len)
        self.max_queue = max_queue
        self.prefill = prefill
        self.counters = Counters()
        self._waiting: deque[Request] = deque()
        self._running: list[_Running] = []  # in the order of admission
        self._free = list(range(decoder.target_engine.requests))  # a heap
        self._numbers = 0
        self._lock = threading.Lock()  # of the queue
        self._stepping = threading.Lock()
        self._stepper: int | None = None  # the thread that does

    # -- requests in ---------------------------------------------------------------------------------------------------
    def submit(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        deliver: Callable[[Chunk], None] | None = None,
        **options,
    ) -> Request:
        """Queue a request; from any thread.

        prompt: text, token ids or chat messages. timeout: seconds from now, after which it ends with what it has
        (finish reason deadline); None: never. deliver: called with each chunk by the thread that steps, instead of
        keeping them for an iteration over the request. options: the fields of `Options`, but for the schedule, which is
        the batch's, and mode strict. UsageError for a bad option or prompt; QueueFull when too many wait.
        """
        if timeout is not None:
            check_number("timeout", timeout, Real)
            if not timeout > 0:
                raise UsageError(f"timeout {timeout}: must be a number of seconds above 0")
        if deliver is not None and not callable(deliver):
            raise UsageError(f"deliver {deliver!r}: must be a function that takes a chunk")
        asked = Options.of(**options)
        for name in ("scheduler", "confidence_threshold", "draft_len", "prefill_chunk"):
            if getattr(asked, name) != getattr(Options(), name):
                raise UsageError(f"{name.replace('_', ' ')}: is the batch's, not a request's; give it to Decoder.batch")
        if asked.mode == "strict":
            raise UsageError("mode strict: a batch has none, since it runs many tokens at once; use Decoder.session")
        tokens = self.decoder.encode(prompt)
        self.decoder.check_room(len(tokens))
        asked = replace(asked, draft_len=self.draft_len)
        answer = Answer(self.decoder, asked, tokens, scheduler=self.scheduler)
        check_rule(self.scheduler, answer.rule)
        deadline = None if timeout is None else monotonic() + timeout
        with self._lock:
            if self._queue_is_full():
                raise QueueFull(
                    f"{len(self._waiting)} requests wait already and {len(self._running)} run: try again later, or"
                    f" allow a longer queue (max_queue is {self.max_queue}, beyond the free places)"
                )
            self._numbers += 1
            request = Request(self, self._numbers, tokens, answer, deadline, deliver)
            if answer.rule == "exact" and isinstance(self.scheduler, Throughput):
                self._check_streams(request)
            self._waiting.append(request)
        return request

    def _check_streams(self, request: Request) -> None:
        """The confidences of requests with the same random numbers would tell of each other's drafts."""
        others = [*self._waiting, *(running.request for running in self._running)]
        if any(other.answer.rule == "exact" and other.stream == request.stream for other in others):
            seed, number = request.stream
            raise UsageError(
                f"seed {seed}: another exact request of this batch has it too, with the same number (request {number});"
                " give each a number or a seed of its own"
            )

    def generate(self, prompts: Sequence[Prompt], **options) -> list[Generation]:
        """Answer all prompts, with the same options; see `submit`. The order of the answers is that of the prompts.

        Each has random numbers of its own: prompt i has those of `request` + i. Where a prompt is refused, none of the
        others is answered.
        """
        if isinstance(prompts, str) or any(isinstance(prompt, dict | Integral) for prompt in prompts):
            raise UsageError("prompts: this is one prompt; give a list of them")
        first, requests = Options.of(**options).request, list[Request]()
        check_number("request", first)
        try:
            for number, prompt in enumerate(prompts):
                while self._queue_is_full() and self.step():
                    pass
                requests.append(self.submit(prompt, **{**options, "request": first + number}))
            return [request.result() for request in requests]
        except BaseException:
            for request in requests:
                request.cancel()
            raise

    def _queue_is_full(self) -> bool:
        return sum(request.expired() is None for request in self._waiting) >= self.max_queue + len(self._free)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def close(self) -> None:
        """End all requests as cancelled."""
        with self._turn():
            for request in [*self._waiting, *(running.request for running in self._running)]:
                request.cancel()
            self._end_expired()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """One thread at a time; what it is interrupted in ends for all that run, since half a step cannot be told from
        a whole one."""
        if self._stepper == threading.get_ident():
            raise UsageError("the batch is in a step: what takes its chunks must not step or close it, only cancel")
        with self._stepping:
            self._stepper = threading.get_ident()
            try:
                yield
            except BaseException:
                self._abandon()
                raise
            finally:
                self._stepper = None

    def _abandon(self) -> None:
        for running in [*self._running]:
            if running.request.generation is None:
                self._end(running, "error", "interrupted")
        self._running, self._free = [], list(range(self.decoder.target_engine.requests))
        self._waiting = deque(request for request in self._waiting if request.generation is None)

    # -- a step --------------------------------------------------------------------------------------------------------
    def step(self) -> bool:
        """Admit who waits, and advance every request that runs; False: there is none.

        What goes wrong with one request (a logit processor that fails, logits that are no numbers) ends that one, with
        finish reason error; a target that fails ends those in the step. None of it is raised here.
        """
        with self._turn():
            self._check_owner()
            self._end_expired()
            self._admit()
            if not self._running:
                return False
            self.decoder.owner = self
            parts = self._read() + self._anchors()
            try:
                self._run(parts)
            except AssertionError:  # a fault of ours, which nobody should take for the engine's
                raise
            except Exception as error:
                for part in parts:
                    if part.running.request.generation is None:
                        self._end(part.running, "error", str(error) or type(error).__name__)
            self.counters.steps += 1
            return True

    def _read(self) -> list[_Part]:
        """Pieces of the prompts that are not read yet: in equal shares, so that a long one holds up no short one."""
        reading = sorted((r for r in self._running if r.unread), key=lambda r: len(r.unread))
        room = self.prefill if len(reading) < len(self._running) else CHUNK
        most, parts = self.decoder.target_engine.most_rows or CHUNK, []
        for others, running in zip(reversed(range(len(reading))), reading, strict=True):
            count = min(max(room // (others + 1), 1), most, len(running.unread))
            parts.append(_Part.of(running, running.unread[:count]))
            room -= count
        return parts

    def _anchors(self) -> list[_Part]:
        return [_Part.of(r, [r.anchor], Draft([], None)) for r in self._running if not r.unread]

    def _run(self, parts: list[_Part]) -> None:
        started, engines = perf_counter(), (self.decoder.target_engine, self.decoder.drafter_engine)
        inside = sum(engine.seconds for engine in engines)
        self._draft(parts)
        drafted = perf_counter()
        self._schedule(parts)
        began = perf_counter()
        with_taps = any(part.running.drafter is not None for part in parts)
        targets = [part.running.target for part in parts]
        forwards = forward_all(targets, [p.rows for p in parts], [p.logit_rows for p in parts], taps=with_taps)
        kept = [self._judge(part, forward) for part, forward in zip(parts, forwards, strict=True)]
        verified = perf_counter()
        kinds = self._commit(parts, forwards, kept)
        ended = perf_counter()
        spent = _Spent(drafted - started, verified - began, ended - started, sum(e.seconds for e in engines) - inside)
        for part, kind in zip(parts, kinds, strict=True):
            self._hand_out(part, kind, spent)

    def _draft(self, parts: list[_Part]) -> None:
        """Stage 1, of all requests that want drafts in one run."""
        asking = []
        for part in parts:
            running = part.running
            if part.draft is not None and running.drafter is not None:
                part.paused = running.answer.pausing.begin_round()
                if not part.paused and running.answer.budget(running.target) > 0:
                    asking.append(part)
        if not asking or not self.scheduler.drafts(_numbers(asking), *_load(parts)):
            return
        drafters = [part.running.drafter for part in asking if part.running.drafter is not None]
        anchors = [part.running.anchor for part in asking]
        drawings = [Drawing(**part.running.drawing(self.draft_len)) for part in asking]
        try:
            reading = any(part.running.answer.rules.read_confidence for part in asking)
            drafts = propose_all(drafters, anchors, self.draft_len, drawings, read_confidence=reading)
        except DraftError as error:
            for part in asking:
                part.fail(str(error))
            return
        for part, draft in zip(asking, drafts, strict=True):
            part.draft = draft
            if draft.sound < len(draft.tokens):
                part.fail(UNSOUND)

    def _schedule(self, parts: list[_Part]) -> None:
        """Stage 2, of all requests together: a request that has no drafts is an anchor that the step has to run."""
        decoding = [(part, part.draft) for part in parts if part.draft is not None]
        if not decoding:
            return
        drafted, confidence = [], np.zeros((len(decoding), self.draft_len), np.float32)
        for (part, draft), row in zip(decoding, confidence, strict=True):
            drafted.append(max(0, min(len(draft.tokens), part.running.answer.budget(part.running.target))))
            if draft.confidence is not None:
                row[: len(draft.confidence)] = draft.confidence
        numbers, beside = _numbers([part for part, _ in decoding]), _load(parts)[1]
        lengths = self.scheduler.lengths(confidence, np.array(drafted), numbers, beside)
        for (part, draft), length in zip(decoding, lengths.tolist(), strict=True):
            # The cut looks at the drafts, so it is made when the lengths are chosen: no schedule may know of it before.
            part.rows += draft.tokens[: min(length, usable(draft, part.running.answer.rules.stops))]

    def _judge(self, part: _Part, forward: Forward) -> int:
        """Stage 3 behind the forward: choose the tokens of one request. How many of its rows are to be kept."""
        running, rules = part.running, part.running.answer.rules
        if running.request.expired():
            return 0
        try:
            if part.draft is None:
                del running.unread[: len(part.rows)]
                if not running.unread:
                    part.new = running.answer.first(forward.logits[0], len(running.request.prompt))
                return len(part.rows)
            first, length = running.target.length + 1, len(part.rows) - 1
            verdict = part.verdict = decide(forward, first, part.draft, length, rules.judge, rules.ends)
        except Exception as error:  # of a logit processor, or of logits that are no numbers
            self._end(running, "error", str(error) or type(error).__name__)
            return 0
        part.new = verdict.emitted(part.draft)
        return verdict.accepted + 1

    def _commit(self, parts: list[_Part], forwards: list[Forward], kept: list[int]) -> list[Kind]:
        """Stage 4, of all requests: see commit.py."""
        targets = [part.running.target for part in parts]
        direct = [target.can_commit(count) for target, count in zip(targets, kept, strict=True)]
        commit_all(targets, [count if can else 0 for count, can in zip(kept, direct, strict=True)])
        kinds: list[Kind] = []
        for part, forward, count, can in zip(parts, forwards, kept, direct, strict=True):
            if can and forward.taps is not None:
                self._observe(part, forward.taps[:count])
            kinds.append(("full" if count == len(part.rows) else "partial") if can else "replay")
        for part, count, can in zip(parts, kept, direct, strict=True):
            if not can:  # runs of its own, after which the arrays of the step's run are void
                taps = replay(part.running.target, part.rows[:count], taps=part.running.drafter is not None)
                self._observe(part, taps)
        return kinds

    def _observe(self, part: _Part, taps: Rows | None) -> None:
        if part.running.drafter is None or taps is None:
            return
        try:
            part.running.drafter.observe(taps)
        except DraftError as error:
            part.fail(str(error))

    # -- answers out ---------------------------------------------------------------------------------------------------
    def _hand_out(self, part: _Part, kind: Kind, spent: "_Spent") -> None:
        running, answer, verdict = part.running, part.running.answer, part.verdict
        if running.request.generation is not None:
            return  # it ended within the step
        done = None
        if part.draft is not None and verdict is not None:
            confidence = part.draft.confidence
            done = Round(
                anchor=running.anchor,
                position=part.before[0],
                drafts=part.draft.tokens,
                confidences=None if confidence is None else confidence.tolist(),
                verified=verdict.verified,
                accepted=verdict.accepted,
                emitted=part.new,
                commit=kind,
                target_steps=running.target.steps - part.steps,
                target_length=(part.before[0], running.lengths[0]),
                drafter_length=(part.before[1], running.lengths[1]),
                draft_ms=spent.draft * 1e3,
                verify_ms=spent.verify * 1e3,
                total_ms=spent.total * 1e3,
                engine_ms=spent.engine * 1e3,
                failure=part.failure,
            )
            answer.count(done, paused=part.paused)
            self.counters.count(done)
        elif part.failure is not None:
            answer.failed(part.failure)
        if part.failure is not None:
            self.counters.drafter_failures += 1
        if part.draft is None:
            self.counters.prompt_tokens += len(part.rows)
        if part.new:
            running.anchor = part.new[-1]
            self.counters.generated_tokens += len(part.new)
            self._give(running, answer.add(part.new, done, full=running.target.length == running.target.limit))

    def _give(self, running: _Running, chunk: Chunk) -> None:
        if chunk.generation is not None and running in self._running:
            self._running.remove(running)
            heapq.heappush(self._free, running.place)
        self._tell(running.request, chunk)
        running.answer.resume()

    def _tell(self, request: Request, chunk: Chunk) -> None:
        if chunk.generation is not None:
            self.counters.ended(chunk.generation)
        request.give(chunk)

    def _end(self, running: _Running, reason: str, error: str | None = None) -> None:
        self._give(running, running.answer.add([], None, full=False, finish=reason, error=error))

    def _end_expired(self) -> None:
        for running in [*self._running]:
            reason = running.request.expired()
            if reason is not None:
                self._end(running, reason)
        with self._lock:
            expired = [request for request in self._waiting if request.expired()]
        for request in expired:
            if request.generation is None:
                request.answer.resume()
                self._tell(request, request.answer.add([], None, full=False, finish=request.expired()))
        with self._lock:
            self._waiting = deque(request for request in self._waiting if request.generation is None)

    def _admit(self) -> None:
        with self._lock:
            while self._free and self._waiting:
                self._running.append(_Running(self._waiting[0], self.decoder, self._free[0]))
                heapq.heappop(self._free)
                self._waiting.popleft()

    def _check_owner(self) -> None:
        if self.decoder.owner is not self:
            for running in [*self._running]:
                self._end(running, "error", "another batch or session of the same decoder took this batch's engines")


def _numbers(parts: Sequence[_Part]) -> np.ndarray:
    return np.array([part.running.request.number for part in parts])


def _load(parts: Sequence[_Part]) -> tuple[int, int]:
    """Before anything is drafted: the anchors of the step, and its tokens of prompts."""
    anchors = sum(part.draft is not None for part in parts)
    return anchors, sum(len(part.rows) for part in parts) - anchors


@dataclass(frozen=True)
class _Spent:
    """Seconds of a step, which are those of every request in it."""

    draft: float
    verify: float
    total: float
    engine: float
