"""One generation: what was asked for, by which rules its tokens are chosen, and what it has returned so far.

A session has one at a time, a batch as many as it has places. Neither decides anything about a token or an ending.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from time import perf_counter
from typing import TYPE_CHECKING, Self

import numpy as np

from dspark.errors import UsageError
from dspark.manifest import CHUNK
from dspark.runtime.loop import Round, Rules
from dspark.runtime.metrics import Stats
from dspark.runtime.random import Streams, fresh_seed
from dspark.runtime.sampling import COLDEST, LogitProcessor, LogProbs, Sampling
from dspark.runtime.schedule import Pausing, Scheduler, make_scheduler
from dspark.runtime.target import Target
from dspark.runtime.tokens import Detokenizer, Ending
from dspark.runtime.verify import RULES, Draws, Judge

if TYPE_CHECKING:
    from dspark.runtime.decoder import Decoder

MODES = ("speculative", "plain", "strict")
DEFAULT_RULE = "coupled"  # at a temperature above 0; docs/sampling.md has the measurement behind it
Prompt = str | Sequence[int] | Sequence[dict]  # text, token ids, or chat messages [{"role", "content"}]
OnRound = Callable[[Round], None]

log = logging.getLogger("dspark")


@dataclass(frozen=True)
class Options(Sampling):
    """How one turn is generated; see `Sampling` for the law of a token."""

    max_new_tokens: int = 256
    # plain: ordinary decoding, one token per target forward, on the same engine. strict: drafts are checked by such
    # forwards too, so that not even rounding can tell the output from plain decoding's; no gain in speed.
    mode: str = "speculative"
    sampling: str | None = None  # one of RULES, at a temperature above 0; None: DEFAULT_RULE
    draft_temperature: float | None = None  # drafts are drawn at it, 0: they are argmaxes; None: the rule's own
    seed: int | None = None  # of the random numbers, 0 to 2**64 - 1; None: a fresh one, which the generation tells
    request: int = 0  # tells requests of one seed apart
    scheduler: str | None = None  # one of SCHEDULERS; None: see `make_scheduler`
    confidence_threshold: float | None = None  # verify up to the first draft with less confidence; 0: all
    pause_below: float | None = None  # pause drafting while the accept rate is lower; None: never
    draft_len: int | None = None  # drafts per round, 1..block_size; None: the bundle's default
    ignore_eos: bool = False  # the model's own stop tokens are tokens like others
    stop_token_ids: Sequence[int] = ()  # further ones, which end the answer in any case
    stop: Sequence[str] = ()  # texts that end the answer; they are not part of its text
    logprobs: int | None = None  # report log-probabilities: of the tokens, and of so many likeliest ones
    logit_processors: Sequence[LogitProcessor] = ()
    prefill_chunk: int = CHUNK  # prompt tokens per target forward; fewer where the engine takes fewer
    read_confidence: bool = False  # report confidences in rounds even where the scheduler has no use for them

    @classmethod
    def of(cls, **options) -> Self:
        """UsageError for a name that is not known."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                raise UsageError(f"option {name!r}: not known in this version; there are {', '.join(known)}")
        return cls(**options)


@dataclass(frozen=True)
class Generation:
    """A finished turn. finish_reason: stop (a stop token, the last of token_ids, or a stop string), length
    (max_new_tokens), context (the context limit: the target's cache is full) or cancelled; in a batch also deadline,
    or error."""

    text: str | None  # None: the bundle has no tokenizer
    token_ids: list[int]
    finish_reason: str
    stats: Stats
    seed: int | None = None  # of the random numbers; None: none were drawn
    logprobs: list[LogProbs] | None = None  # of token_ids, where asked for
    error: str | None = None  # what went wrong, where the finish_reason is error

    def to_json(self) -> dict:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if self.logprobs is not None:
            fields["logprobs"] = [entry.to_json() for entry in self.logprobs]
        for name in ("seed", "logprobs", "error"):
            if fields[name] is None:
                del fields[name]
        return {**fields, "stats": self.stats.to_json()}


@dataclass(frozen=True)
class Chunk:
    """What one round added: its tokens, and the text that became certain. The last one carries the generation."""

    text: str
    token_ids: list[int]
    round: Round | None  # None: the prefill gave this chunk
    generation: Generation | None = None
    logprobs: list[LogProbs] | None = None  # of token_ids, where asked for


class Answer:
    """A generation under way."""

    def __init__(
        self,
        decoder: "Decoder",
        options: Options,
        tokens: Sequence[int],
        *,
        scheduler: Scheduler | None = None,
        check: Callable[[], None] = lambda: None,
    ):
        """tokens: of the whole prompt. scheduler: that of a batch; None: the options say. check: see `Rules`.

        UsageError for options that are out of range, contradict each other, or that the bundle cannot do.
        """
        _check_types(options)
        options.check()
        if options.mode not in MODES:
            raise UsageError(f"mode {options.mode!r}: choose one of {', '.join(MODES)}")
        if options.max_new_tokens < 1:
            raise UsageError(f"max new tokens {options.max_new_tokens}: must be at least 1")
        check_chunk(options.prefill_chunk)
        if options.logprobs is not None and not 0 <= options.logprobs <= decoder.manifest.target.vocab_size:
            raise UsageError(f"logprobs {options.logprobs}: must be from 0 to the size of the vocabulary")
        self.options = options
        self.rule = "greedy" if options.temperature == 0 else options.sampling or DEFAULT_RULE
        draft_len = draft_len_of(decoder, options.draft_len)
        if scheduler is None:
            scheduler = make_scheduler(
                options.scheduler,
                options.confidence_threshold,
                decoder.manifest.drafter.confidence.enabled,
                self.rule,
                decoder.sps,
                decoder.calibration,
                decoder.no_sps,
            )
        seed = fresh_seed() if options.seed is None else int(options.seed)
        stops = frozenset(options.stop_token_ids) | (frozenset() if options.ignore_eos else decoder.stops)
        self._make_ending = partial(_ending, decoder, options, stops)
        self._ending = self._make_ending()
        self.rules = Rules(
            draft_len=draft_len,
            scheduler=scheduler,
            judge=_judge(decoder, options, Draws(Streams(seed, options.request)), tokens),
            stops=stops,
            ends=lambda token: self._ending.push(token),
            read_confidence=options.read_confidence or scheduler.reads_confidence,
            stepwise=options.mode == "strict",
            check=check,
        )
        self.pausing = Pausing(options.pause_below)
        self.seed = seed if options.temperature > 0 else None
        self.stats = Stats()
        self.token_ids: list[int] = []
        self._pieces: list[str] | None = None if decoder.tokenizer is None else []
        self._since = perf_counter()

    def resume(self) -> None:
        """The clock goes on, which `add` stopped: the time of whoever reads the answer is not the answer's."""
        self._since = perf_counter()

    def first(self, logits: np.ndarray, prompt: int) -> list[int]:
        """The token that the prefill gives, from the last row's logits [V]. prompt: how many tokens came before."""
        token = self.rules.judge.choose(logits, prompt)
        self.rules.ends(token)
        return [token]

    def budget(self, target: Target) -> int:
        """The most drafts that may be verified: the extra token comes on top, and the rows of both must fit."""
        return min(self.options.max_new_tokens - len(self.token_ids), target.limit - target.length) - 1

    def count(self, done: Round, *, paused: bool = False) -> None:
        """Take a round into the statistics."""
        self.stats.add(done, 0 if self.options.mode == "plain" else self.rules.draft_len)
        self.stats.paused_rounds += paused
        if done.drafts:
            self.pausing.end_round(done.verified, done.accepted)
            self.stats.pauses = self.pausing.pauses
        if done.failure is not None:
            self.failed(done.failure)

    def failed(self, failure: str) -> None:
        """The drafter is of no more use to this generation."""
        self.stats.drafter_failures += 1
        log.warning("%s; this generation goes on without drafts", failure)

    def add(
        self, new: list[int], done: Round | None, *, full: bool, finish: str | None = None, error: str | None = None
    ) -> Chunk:
        """What a round, or the prefill, returned. full: the context limit is reached. finish: it ends for this reason,
        whatever it says itself."""
        self.token_ids += new
        finish = finish or self._finish_reason(full)
        if error is not None:  # in the middle of a round, which may have decided more tokens than it returns
            self._ending = self._make_ending()
            for token in self.token_ids:
                self._ending.push(token)
        piece = self._ending.take(last=finish is not None)
        if error is not None:
            piece = piece[sum(map(len, self._pieces or ())) :]
        if self._pieces is not None:
            self._pieces.append(piece)
        self.stats.emitted = len(self.token_ids)
        self.stats.total_ms += (perf_counter() - self._since) * 1e3
        self.stats.prefill_ms = self.stats.prefill_ms or self.stats.total_ms
        every = None if self.options.logprobs is None else self.rules.judge.logprobs
        logprobs = None if every is None else every[len(self.token_ids) - len(new) : len(self.token_ids)]
        if finish is None:
            return Chunk(piece, new, done, None, logprobs)
        text = None if self._pieces is None else "".join(self._pieces)
        if every is not None:
            every = every[: len(self.token_ids)]
        generation = Generation(text, self.token_ids, finish, self.stats, self.seed, every, error)
        return Chunk(piece, new, done, generation, logprobs)

    def _finish_reason(self, full: bool) -> str | None:
        if self._ending.stopped:
            return "stop"
        if len(self.token_ids) == self.options.max_new_tokens:
            return "length"
        return "context" if full else None


def check_chunk(size: int) -> None:
    if size < 1:
        raise UsageError(f"prefill chunk {size}: must be at least 1 token")


_INTEGERS = ("top_k", "max_new_tokens", "seed", "request", "draft_len", "logprobs", "prefill_chunk")
_LISTS = ("stop_token_ids", "stop", "logit_processors")
_NUMBERS = ("draft_temperature", "confidence_threshold", "pause_below")


def _check_types(options: Options) -> None:
    """UsageError for what is no number where one has to be, or no list."""
    names = (*_NUMBERS, *(field.name for field in dataclasses.fields(Sampling)))
    for name in (*_INTEGERS, *names):
        if getattr(options, name) is not None or name not in (*_NUMBERS, "seed", "draft_len", "logprobs"):
            check_number(name.replace("_", " "), getattr(options, name), Integral if name in _INTEGERS else Real)
    for name in _LISTS:
        value = getattr(options, name)
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise UsageError(f"{name.replace('_', ' ')} {value!r}: must be a list")
    for token in options.stop_token_ids:
        check_number("stop token", token, Integral)
    for processor in options.logit_processors:
        if not callable(processor):
            raise UsageError(f"logit processor {processor!r}: must be a function (tokens, logits) -> logits")


def check_number(name: str, value: object, kind: type = Integral) -> None:
    """UsageError for what is none."""
    if isinstance(value, bool) or not isinstance(value, kind):
        raise UsageError(f"{name} {value!r}: must be {'an integer' if kind is Integral else 'a number'}")


def draft_len_of(decoder: "Decoder", draft_len: int | None) -> int:
    """Drafts per round; None: the bundle's default. UsageError where the drafter takes no such number."""
    drafter = decoder.manifest.drafter
    draft_len = decoder.manifest.profiles.draft_len if draft_len is None else draft_len
    check_number("draft len", draft_len)
    if not 1 <= draft_len <= drafter.block_size:
        hint = " (for decoding without drafts use mode plain)" if draft_len == 0 else ""
        raise UsageError(f"draft length {draft_len}: this drafter takes 1 to {drafter.block_size}{hint}")
    return draft_len


def _judge(decoder: "Decoder", options: Options, draws: Draws, tokens: Sequence[int]) -> Judge:
    rule = DEFAULT_RULE if options.sampling is None else options.sampling
    if rule not in RULES:
        raise UsageError(f"sampling {rule!r}: choose one of {', '.join(RULES)}")
    wanted = options.draft_temperature or 0
    if not (wanted == 0 or COLDEST <= wanted < float("inf")):
        raise UsageError(f"draft temperature {wanted:g}: must be 0 (argmax) or {COLDEST:g} or more")
    if options.temperature == 0:
        draft_temperature = 0.0
    elif options.draft_temperature is None:
        draft_temperature = 0.0 if rule == "opportunistic" else options.temperature
    else:
        draft_temperature = options.draft_temperature
    if options.mode != "plain" and draft_temperature > 0 and not decoder.can_draw:
        raise UsageError(
            "this bundle's drafter cannot draw tokens (it was exported by an older version): export it again, or"
            " set the draft temperature to 0"
        )
    return Judge(
        options,
        rule,
        draws,
        decoder.vocabulary,
        tokens,
        draft_temperature=draft_temperature,
        processors=options.logit_processors,
        logprobs=options.logprobs,
    )


def _ending(decoder: "Decoder", options: Options, stops: frozenset[int]) -> Ending:
    tokenizer, size = decoder.tokenizer, decoder.manifest.target.vocab_size
    for token in options.stop_token_ids:
        if not 0 <= token < size:
            raise UsageError(f"stop token {token}: the vocabulary has 0 to {size - 1}")
    if not all(isinstance(text, str) and text for text in options.stop):
        raise UsageError(f"stop {options.stop!r}: give a list of texts that are not empty")
    if options.stop and tokenizer is None:
        raise UsageError("this bundle has no tokenizer: stop texts cannot be found, give stop token ids instead")
    return Ending(stops, options.stop, None if tokenizer is None else Detokenizer(tokenizer))
