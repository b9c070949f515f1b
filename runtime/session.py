"""A conversation with one request's state: prefill, rounds, stop rules, and what must hold between two turns.

Invariant between rounds: `tokens` is everything given and returned; the target's cache holds the first `target.length`
of them, and what is missing is at most the last one (the anchor), unless a turn was cut short. A next turn prefills
what is missing, then its own tokens, so it equals a fresh start from the same tokens.
"""

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from dspark.errors import DSparkError, UsageError
from dspark.manifest import CHUNK
from dspark.runtime.draft import Drafter
from dspark.runtime.loop import Round, Rules, decode_round
from dspark.runtime.metrics import Stats
from dspark.runtime.random import Streams, fresh_seed
from dspark.runtime.sampling import COLDEST, LogitProcessor, LogProbs, Sampling
from dspark.runtime.schedule import Pausing, make_scheduler
from dspark.runtime.target import Target
from dspark.runtime.tokens import Detokenizer, Ending
from dspark.runtime.verify import RULES, Cancelled, Draws, Judge

if TYPE_CHECKING:
    from dspark.runtime.decoder import Decoder

MODES = ("speculative", "plain", "strict")
DEFAULT_RULE = "coupled"  # at a temperature above 0; docs/sampling.md has the measurement behind it
Prompt = str | Sequence[int] | Sequence[dict]  # text, token ids, or chat messages [{"role", "content"}]
OnRound = Callable[[Round], None]


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


@dataclass(frozen=True)
class Generation:
    """A finished turn. finish_reason: stop (a stop token, the last of token_ids, or a stop string), length
    (max_new_tokens), context (the context limit: the target's cache is full) or cancelled."""

    text: str | None  # None: the bundle has no tokenizer
    token_ids: list[int]
    finish_reason: str
    stats: Stats
    seed: int | None = None  # of the random numbers; None: none were drawn
    logprobs: list[LogProbs] | None = None  # of token_ids, where asked for

    def to_json(self) -> dict:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if self.logprobs is not None:
            fields["logprobs"] = [entry.to_json() for entry in self.logprobs]
        for name in ("seed", "logprobs"):
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


@dataclass(frozen=True)
class _Turn:
    """What `stream` has worked out before the turn begins."""

    number: int
    kept: int  # tokens of the session that stay
    added: list[int]  # that follow them
    options: Options
    rules: Rules
    ending: Ending
    pausing: Pausing
    seed: int | None


def _check_chunk(size: int) -> None:
    if size < 1:
        raise UsageError(f"prefill chunk {size}: must be at least 1 token")


_INTEGERS = ("top_k", "max_new_tokens", "seed", "request", "draft_len", "logprobs", "prefill_chunk")
_LISTS = ("stop_token_ids", "stop", "logit_processors")
_NUMBERS = ("draft_temperature", "confidence_threshold", "pause_below")


def _check_types(options: Options) -> None:
    """UsageError for what is no number where one has to be, or no list."""
    names = (*_NUMBERS, *(field.name for field in dataclasses.fields(Sampling)))
    for name in (*_INTEGERS, *names):
        value, kind = getattr(options, name), Integral if name in _INTEGERS else Real
        optional = name in (*_NUMBERS, "seed", "draft_len", "logprobs")
        if isinstance(value, bool) or not (isinstance(value, kind) or (value is None and optional)):
            wanted = "an integer" if kind is Integral else "a number"
            raise UsageError(f"{name.replace('_', ' ')} {value!r}: must be {wanted}")
    for name in _LISTS:
        value = getattr(options, name)
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise UsageError(f"{name.replace('_', ' ')} {value!r}: must be a list")


class Session:
    """One conversation on a decoder. Its engines have room for one: another session's turn takes their caches, and
    this one then prefills its tokens again."""

    def __init__(self, decoder: "Decoder"):
        self.decoder = decoder
        self.tokens: list[int] = []  # given and returned so far
        self._turns = 0  # begun so far: an older stream notices that it was overtaken
        self._cancelled = threading.Event()
        drafter = decoder.manifest.drafter
        self.target = Target(decoder.target_engine, decoder.context_limit)
        self.drafter = Drafter(decoder.drafter_engine, drafter, decoder.context_limit)

    def generate(self, prompt: Prompt, *, on_round: OnRound | None = None, **options) -> Generation:
        """Continue the conversation by `prompt` and an answer; on_round is called with every finished round.

        Prompt, options and errors as for `stream`.
        """
        for chunk in self.stream(prompt, **options):
            if on_round is not None and chunk.round is not None:
                on_round(chunk.round)
        assert chunk.generation is not None
        return chunk.generation

    def stream(self, prompt: Prompt, **options) -> Iterator[Chunk]:
        """Generate in pieces, one per round.

        prompt: text or token ids that follow what the session holds, or chat messages [{"role", "content"}]: always the
        whole conversation, of which only what the session does not hold yet is run (see `Decoder.encode`). options:
        the fields of `Options`. Leaving the iterator early ends the turn after the last round handed out. UsageError,
        before anything has changed, for a bad option, an empty prompt, or one that does not fit in the context.
        DSparkError when the iterator goes on after another turn on the same decoder began.
        """
        known = [field.name for field in dataclasses.fields(Options)]
        for name in options:
            if name not in known:
                raise UsageError(f"option {name!r}: not known in this version; there are {', '.join(known)}")
        turn = self._prepare(Options(**options), *self._encode(prompt))
        self._turns += 1
        self._cancelled.clear()
        return self._run(turn)

    def cancel(self) -> None:
        """End the running turn, from any thread: in its round, as soon as the engine has run, and before the round
        decides anything. The generation ends with what was returned so far, and the session can go on."""
        self._cancelled.set()

    def next_logits(self, prompt: Prompt, prefill_chunk: int = CHUNK) -> np.ndarray:
        """Continue the conversation by `prompt` without an answer: the target's next-token logits, fp32 [V]."""
        _check_chunk(prefill_chunk)
        kept, added = self._encode(prompt)
        self._turns += 1
        self._claim()
        self._rewind(kept)
        self.tokens += added
        return self._prefill(None, prefill_chunk, lambda: None).copy()

    def _encode(self, prompt: Prompt) -> tuple[int, list[int]]:
        """How many of the session's tokens stay, and what follows them."""
        kept, added = len(self.tokens), self.decoder.encode(prompt, first=not self.tokens)
        if not isinstance(prompt, str) and any(isinstance(item, dict) for item in prompt):
            # Messages are the whole conversation: a template may write earlier turns otherwise than they were decoded.
            same = [a == b for a, b in zip(self.tokens, added[:-1], strict=False)]
            kept = same.index(False) if False in same else len(same)
            added = added[kept:]
        size, limit = kept + len(added), self.target.limit
        if not size:
            raise UsageError("the prompt is empty: give at least one token")
        if size > limit:
            raise UsageError(f"the prompt makes {size} tokens, the context limit of this bundle is {limit}: shorten it")
        return kept, added

    def _prepare(self, options: Options, kept: int, added: list[int]) -> _Turn:
        """Check the options, and make of them what the rounds need."""
        drafter = self.decoder.manifest.drafter
        _check_types(options)
        options.check()
        if options.mode not in MODES:
            raise UsageError(f"mode {options.mode!r}: choose one of {', '.join(MODES)}")
        if options.max_new_tokens < 1:
            raise UsageError(f"max new tokens {options.max_new_tokens}: must be at least 1")
        _check_chunk(options.prefill_chunk)
        if options.logprobs is not None and not 0 <= options.logprobs <= self.decoder.manifest.target.vocab_size:
            raise UsageError(f"logprobs {options.logprobs}: must be from 0 to the size of the vocabulary")
        draft_len = self.decoder.manifest.profiles.draft_len if options.draft_len is None else options.draft_len
        if not 1 <= draft_len <= drafter.block_size:
            hint = " (for decoding without drafts use mode plain)" if draft_len == 0 else ""
            raise UsageError(f"draft length {draft_len}: this drafter takes 1 to {drafter.block_size}{hint}")
        rule = DEFAULT_RULE if options.sampling is None else options.sampling
        drawn = options.temperature > 0
        scheduler = make_scheduler(
            options.scheduler,
            options.confidence_threshold,
            drafter.confidence.enabled,
            rule if drawn else "greedy",
            self.decoder.sps,
            self.decoder.calibration,
            self.decoder.no_sps,
        )
        seed = fresh_seed() if options.seed is None else int(options.seed)
        tokens = self.tokens[:kept] + added
        stops = frozenset(options.stop_token_ids) | (frozenset() if options.ignore_eos else self.decoder.stops)
        ending = self._ending(options, stops)
        rules = Rules(
            draft_len=draft_len,
            scheduler=scheduler,
            judge=self._judge(options, rule, Draws(Streams(seed, options.request)), tokens),
            stops=stops,
            ends=ending.push,
            read_confidence=options.read_confidence or scheduler.reads_confidence,
            stepwise=options.mode == "strict",
            check=self._check_cancelled,
        )
        pausing, number = Pausing(options.pause_below), self._turns + 1
        return _Turn(number, kept, added, options, rules, ending, pausing, seed if drawn else None)

    def _judge(self, options: Options, rule: str, draws: Draws, tokens: Sequence[int]) -> Judge:
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
        if options.mode != "plain" and draft_temperature > 0 and not self.decoder.can_draw:
            raise UsageError(
                "this bundle's drafter cannot draw tokens (it was exported by an older version): export it again, or"
                " set the draft temperature to 0"
            )
        return Judge(
            options,
            rule,
            draws,
            self.decoder.vocabulary,
            tokens,
            draft_temperature=draft_temperature,
            processors=options.logit_processors,
            logprobs=options.logprobs,
        )

    def _ending(self, options: Options, stops: frozenset[int]) -> Ending:
        tokenizer, size = self.decoder.tokenizer, self.decoder.manifest.target.vocab_size
        for token in options.stop_token_ids:
            if not 0 <= token < size:
                raise UsageError(f"stop token {token}: the vocabulary has 0 to {size - 1}")
        if not all(isinstance(text, str) and text for text in options.stop):
            raise UsageError(f"stop {options.stop!r}: give a list of texts that are not empty")
        if options.stop and tokenizer is None:
            raise UsageError("this bundle has no tokenizer: stop texts cannot be found, give stop token ids instead")
        return Ending(stops, options.stop, None if tokenizer is None else Detokenizer(tokenizer))

    def _run(self, turn: _Turn) -> Iterator[Chunk]:
        started = perf_counter()
        options, rules, ending, pausing = turn.options, turn.rules, turn.ending, turn.pausing
        drafter = None if options.mode == "plain" else self.drafter
        stats, returned, pieces = Stats(), list[int](), list[str]()

        self._check_turn(turn.number)
        self._claim()
        self._rewind(turn.kept)
        self.tokens += turn.added
        new, done, finish = list[int](), None, None
        try:
            logits = self._prefill(drafter, options.prefill_chunk, rules.check)
            new = [rules.judge.choose(logits, len(self.tokens))]
            rules.ends(new[0])
        except Cancelled:
            finish = "cancelled"
        stats.prefill_ms = (perf_counter() - started) * 1e3
        while True:
            self.tokens += new
            returned += new
            finish = finish or self._finish_reason(returned, turn)
            pieces.append(ending.take(last=finish is not None))
            stats.emitted = len(returned)
            stats.total_ms += (perf_counter() - started) * 1e3
            logprobs = None if options.logprobs is None else rules.judge.logprobs[len(returned) - len(new) :]
            if finish is not None:
                text = None if self.decoder.tokenizer is None else "".join(pieces)
                every = None if options.logprobs is None else rules.judge.logprobs
                generation = Generation(text, returned, finish, stats, turn.seed, every)
                yield Chunk(pieces[-1], new, done, generation, logprobs)
                return
            yield Chunk(pieces[-1], new, done, None, logprobs)
            self._check_turn(turn.number, self.decoder.owner is self)
            started = perf_counter()
            # The extra token comes on top of the accepted drafts, and the rows of both must fit in the cache.
            budget = min(options.max_new_tokens - len(returned), self.target.limit - self.target.length) - 1
            paused = drafter is not None and pausing.begin_round()
            try:
                done = decode_round(self.target, drafter, self.tokens[-1], budget, rules, stats.rounds, pause=paused)
            except Cancelled:
                new, done, finish = [], None, "cancelled"
                continue
            stats.add(done, 0 if drafter is None else rules.draft_len)
            stats.paused_rounds += paused
            if done.drafts:
                pausing.end_round(done.verified, done.accepted)
                stats.pauses = pausing.pauses
            new = done.emitted

    def _finish_reason(self, returned: list[int], turn: _Turn) -> str | None:
        if turn.ending.stopped:
            return "stop"
        if len(returned) == turn.options.max_new_tokens:
            return "length"
        if self.target.length == self.target.limit:
            return "context"
        return None

    def _check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise Cancelled

    def _claim(self) -> None:
        """Make the engines' caches this session's; what another session left in them is void."""
        if self.decoder.owner is not self:
            self.target.truncate(0)
            self.drafter.reset()
            self.decoder.owner = self

    def _rewind(self, kept: int) -> None:
        """Forget all but the first `kept` tokens; their cache rows stay where they can."""
        del self.tokens[kept:]
        self.target.truncate(kept)
        self.drafter.truncate(kept)

    def _check_turn(self, turn: int, has_caches: bool = True) -> None:
        if self._turns != turn or not has_caches:
            raise DSparkError("another turn took this stream's place; go on with session.generate([])")

    def _prefill(self, drafter: Drafter | None, chunk: int, check: Callable[[], None]) -> np.ndarray:
        """Run every token that is not in the target's cache, hand their taps to the drafter.

        Returns the next token's logits, fp32 [V], valid until the target's next forward. check: called before each run.
        """
        if self.target.length == len(self.tokens):  # nothing is missing but the last row's logits
            self.target.truncate(len(self.tokens) - 1)
        if drafter is not None:
            # Tokens of a plain turn have no taps: run them again, the drafter's context must have no hole.
            self.target.truncate(drafter.observed)
            drafter.truncate(self.target.length)
        chunk = min(chunk, self.target.engine.most_rows or chunk)
        missing = self.tokens[self.target.length :]
        for at in range(0, len(missing), chunk):
            check()
            rows = missing[at : at + chunk]
            forward = self.target.forward(rows, np.array([len(rows) - 1]), taps=drafter is not None)
            self.target.commit(len(rows))
            if drafter is not None and forward.taps is not None:
                drafter.observe(forward.taps)
        return forward.logits[-1]
