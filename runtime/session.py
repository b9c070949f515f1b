"""A conversation with one request's state: prefill, rounds, stop rules, and what must hold between two turns.

Invariant between rounds: `tokens` is everything given and returned; the target's cache holds the first `target.length`
of them, and what is missing is at most the last one (the anchor), unless a turn was cut short. A next turn prefills
what is missing, then its own tokens, so it equals a fresh start from the same tokens.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from dspark.errors import DSparkError, UsageError
from dspark.runtime.draft import Drafter
from dspark.runtime.loop import Round, Rules, decode_round
from dspark.runtime.metrics import Stats
from dspark.runtime.schedule import make_scheduler
from dspark.runtime.target import Target
from dspark.runtime.tokens import Detokenizer
from dspark.runtime.verify import accept_greedy

if TYPE_CHECKING:
    from dspark.runtime.decoder import Decoder

MODES = ("speculative", "plain")
Prompt = str | Sequence[int] | Sequence[dict]  # text, token ids, or chat messages [{"role", "content"}]
OnRound = Callable[[Round], None]


@dataclass(frozen=True)
class Options:
    """How one turn is generated."""

    max_new_tokens: int = 256
    mode: str = "speculative"  # plain: ordinary decoding, one token per target forward, on the same engine
    scheduler: str | None = None  # off | threshold; None: threshold if a threshold is given, else off
    confidence_threshold: float | None = None  # verify up to the first draft with less confidence; 0: all
    draft_len: int | None = None  # drafts per round, 1..block_size; None: the bundle's default
    ignore_eos: bool = False
    prefill_chunk: int = 512  # prompt tokens per target forward
    read_confidence: bool = False  # report confidences in rounds even where the scheduler has no use for them


@dataclass(frozen=True)
class Generation:
    """A finished turn. finish_reason: stop (a stop token, the last of token_ids), length (max_new_tokens) or context
    (the context limit: the target's cache is full)."""

    text: str | None  # None: the bundle has no tokenizer
    token_ids: list[int]
    finish_reason: str
    stats: Stats

    def to_json(self) -> dict:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**fields, "stats": self.stats.to_json()}


@dataclass(frozen=True)
class Chunk:
    """What one round added: its tokens, and the text that became certain. The last one carries the generation."""

    text: str
    token_ids: list[int]
    round: Round | None  # None: the prefill gave this chunk
    generation: Generation | None = None


class Session:
    """One conversation on a decoder. Its engines have room for one: another session's turn takes their caches, and
    this one then prefills its tokens again."""

    def __init__(self, decoder: "Decoder"):
        self.decoder = decoder
        self.tokens: list[int] = []  # given and returned so far
        self._turns = 0  # begun so far: an older stream notices that it was overtaken
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
        chosen = Options(**options)
        rules, (kept, added) = self._rules(chosen), self._encode(prompt)
        self._turns += 1
        return self._turn(kept, added, chosen, rules, self._turns)

    def next_logits(self, prompt: Prompt, prefill_chunk: int = 512) -> np.ndarray:
        """Continue the conversation by `prompt` without an answer: the target's next-token logits, fp32 [V]."""
        kept, added = self._encode(prompt)
        self._turns += 1
        self._claim()
        self._rewind(kept)
        self.tokens += added
        return self._prefill(None, prefill_chunk).copy()

    def _encode(self, prompt: Prompt) -> tuple[int, list[int]]:
        """How many of the session's tokens stay, and what follows them."""
        kept, added = len(self.tokens), self.decoder.encode(prompt, first=not self.tokens)
        if not isinstance(prompt, str) and any(isinstance(item, dict) for item in prompt):
            # Messages are the whole conversation: a template may write earlier turns otherwise than they were decoded.
            same = [a == b for a, b in zip(self.tokens, added[:-1], strict=False)]
            kept = same.index(False) if False in same else len(same)
            added = added[kept:]
        size, limit = kept + len(added), self.target.limit
        if not added and self.target.length == len(self.tokens):
            raise UsageError("the prompt is empty: give at least one token")
        if size > limit:
            raise UsageError(f"the prompt makes {size} tokens, the context limit of this bundle is {limit}: shorten it")
        return kept, added

    def _rules(self, options: Options) -> Rules:
        drafter = self.decoder.manifest.drafter
        if options.mode not in MODES:
            raise UsageError(f"mode {options.mode!r}: choose one of {', '.join(MODES)}")
        if options.max_new_tokens < 1:
            raise UsageError(f"max new tokens {options.max_new_tokens}: must be at least 1")
        if options.prefill_chunk < 1:
            raise UsageError(f"prefill chunk {options.prefill_chunk}: must be at least 1 token")
        draft_len = self.decoder.manifest.profiles.draft_len if options.draft_len is None else options.draft_len
        if not 1 <= draft_len <= drafter.block_size:
            hint = " (for decoding without drafts use mode plain)" if draft_len == 0 else ""
            raise UsageError(f"draft length {draft_len}: this drafter takes 1 to {drafter.block_size}{hint}")
        scheduler = make_scheduler(options.scheduler, options.confidence_threshold, drafter.confidence.enabled)
        stops = frozenset() if options.ignore_eos else self.decoder.stops
        return Rules(draft_len, scheduler, stops, options.read_confidence or scheduler.reads_confidence)

    def _turn(self, kept: int, added: list[int], options: Options, rules: Rules, turn: int) -> Iterator[Chunk]:
        started = perf_counter()
        drafter = self.drafter if options.mode == "speculative" else None
        stats = Stats()
        text = None if self.decoder.tokenizer is None else Detokenizer(self.decoder.tokenizer)
        pieces: list[str] = []
        returned: list[int] = []

        self._check_turn(turn)
        self._claim()
        self._rewind(kept)
        self.tokens += added
        logits = self._prefill(drafter, options.prefill_chunk)
        new, done = [accept_greedy([], logits[None])[1]], None
        stats.prefill_ms = (perf_counter() - started) * 1e3
        while True:
            self.tokens += new
            returned += new
            finish = self._finish_reason(returned, options, rules)
            if text is not None:
                pieces.append(text.push(new, last=finish is not None))
            stats.emitted = len(returned)
            stats.total_ms += (perf_counter() - started) * 1e3
            if finish is not None:
                generation = Generation(None if text is None else "".join(pieces), returned, finish, stats)
                yield Chunk(pieces[-1] if pieces else "", new, done, generation)
                return
            yield Chunk(pieces[-1] if pieces else "", new, done)
            self._check_turn(turn, self.decoder.owner is self)
            started = perf_counter()
            # The extra token comes on top of the accepted drafts, and the rows of both must fit in the cache.
            budget = min(options.max_new_tokens - len(returned), self.target.limit - self.target.length) - 1
            done = decode_round(self.target, drafter, self.tokens[-1], budget, rules)
            stats.add(done, 0 if drafter is None else rules.draft_len)
            new = done.emitted

    def _finish_reason(self, returned: list[int], options: Options, rules: Rules) -> str | None:
        if returned[-1] in rules.stops:
            return "stop"
        if len(returned) == options.max_new_tokens:
            return "length"
        if self.target.length == self.target.limit:
            return "context"
        return None

    def _claim(self) -> None:
        """Make the engines' caches this session's; what another session left in them is void."""
        if self.decoder.owner is not self:
            self.target.length = 0
            self.drafter.reset()
            self.decoder.owner = self

    def _rewind(self, kept: int) -> None:
        """Forget all but the first `kept` tokens; their cache rows stay."""
        del self.tokens[kept:]
        self.target.length = min(self.target.length, kept)
        self.drafter.truncate(kept)

    def _check_turn(self, turn: int, has_caches: bool = True) -> None:
        if self._turns != turn or not has_caches:
            raise DSparkError("another turn took this stream's place; go on with session.generate([])")

    def _prefill(self, drafter: Drafter | None, chunk: int) -> np.ndarray:
        """Run every token that is not in the target's cache, hand their taps to the drafter.

        Returns the next token's logits, fp32 [V], valid until the target's next forward.
        """
        if drafter is not None:
            # Tokens of a plain turn have no taps: run them again, the drafter's context must have no hole.
            self.target.length = min(self.target.length, drafter.observed)
        missing = self.tokens[self.target.length :]
        for at in range(0, len(missing), chunk):
            rows = missing[at : at + chunk]
            forward = self.target.forward(rows, np.array([len(rows) - 1]), taps=drafter is not None)
            self.target.length += len(rows)
            if drafter is not None and forward.taps is not None:
                drafter.observe(forward.taps)
        return forward.logits[-1]
