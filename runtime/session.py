"""A conversation with one request's state: prefill, rounds, and what must hold between two turns.

Invariant between rounds: `tokens` is everything given and returned; the target's cache holds the first `target.length`
of them, and what is missing is at most the last one (the anchor), unless a turn was cut short. A next turn prefills
what is missing, then its own tokens, so it equals a fresh start from the same tokens.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dspark.errors import DSparkError
from dspark.manifest import CHUNK
from dspark.runtime.draft import Drafter, DraftError
from dspark.runtime.loop import decode_round
from dspark.runtime.request import Answer, Chunk, Generation, OnRound, Options, Prompt, check_chunk
from dspark.runtime.target import Target
from dspark.runtime.verify import Cancelled

if TYPE_CHECKING:
    from dspark.runtime.decoder import Decoder


@dataclass(frozen=True)
class _Turn:
    """What `stream` has worked out before the turn begins."""

    number: int
    kept: int  # tokens of the session that stay
    added: list[int]  # that follow them
    answer: Answer


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
        asked = Options.of(**options)
        kept, added = self._encode(prompt)
        answer = Answer(self.decoder, asked, self.tokens[:kept] + added, check=self._check_cancelled)
        self._turns += 1
        self._cancelled.clear()
        return self._run(_Turn(self._turns, kept, added, answer))

    def cancel(self) -> None:
        """End the running turn, from any thread: in its round, as soon as the engine has run, and before the round
        decides anything. The generation ends with what was returned so far, and the session can go on."""
        self._cancelled.set()

    def next_logits(self, prompt: Prompt, prefill_chunk: int = CHUNK) -> np.ndarray:
        """Continue the conversation by `prompt` without an answer: the target's next-token logits, fp32 [V]."""
        check_chunk(prefill_chunk)
        kept, added = self._encode(prompt)
        self._turns += 1
        self._claim()
        self._rewind(kept)
        self.tokens += added
        return self._prefill(None, prefill_chunk, lambda: None)[0].copy()

    def _encode(self, prompt: Prompt) -> tuple[int, list[int]]:
        """How many of the session's tokens stay, and what follows them."""
        kept, added = len(self.tokens), self.decoder.encode(prompt, first=not self.tokens)
        if not isinstance(prompt, str) and any(isinstance(item, dict) for item in prompt):
            # Messages are the whole conversation: a template may write earlier turns otherwise than they were decoded.
            same = [a == b for a, b in zip(self.tokens, added[:-1], strict=False)]
            kept = same.index(False) if False in same else len(same)
            added = added[kept:]
        self.decoder.check_room(kept + len(added))
        return kept, added

    def _run(self, turn: _Turn) -> Iterator[Chunk]:
        answer, rules, target = turn.answer, turn.answer.rules, self.target
        drafter = None if answer.options.mode == "plain" else self.drafter
        answer.resume()

        self._check_turn(turn.number)
        self._claim()
        self._rewind(turn.kept)
        self.tokens += turn.added
        new, done, finish = list[int](), None, None
        try:
            logits, failure = self._prefill(drafter, answer.options.prefill_chunk, rules.check)
            new = answer.first(logits, len(self.tokens))
            if failure is not None:
                answer.failed(failure)
                drafter = None
        except Cancelled:
            finish = "cancelled"
        while True:
            self.tokens += new
            chunk = answer.add(new, done, full=target.length == target.limit, finish=finish)
            yield chunk
            if chunk.generation is not None:
                return
            self._check_turn(turn.number, self.decoder.owner is self)
            answer.resume()
            paused = drafter is not None and answer.pausing.begin_round()
            anchor, budget, index = self.tokens[-1], answer.budget(target), answer.stats.rounds
            try:
                done = decode_round(target, drafter, anchor, budget, rules, index, pause=paused)
            except Cancelled:
                new, done, finish = [], None, "cancelled"
                continue
            answer.count(done, paused=paused)
            if done.failure is not None:  # the next turn begins with an empty context, and tries again
                self.drafter.reset()
                drafter = None
            new = done.emitted

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

    def _prefill(self, drafter: Drafter | None, chunk: int, check: Callable[[], None]) -> tuple[np.ndarray, str | None]:
        """Run every token that is not in the target's cache, hand their taps to the drafter.

        Returns the next token's logits, fp32 [V], valid until the target's next forward; and why the drafter is of no
        more use, where it failed. check: called before each run.
        """
        if self.target.length == len(self.tokens):  # nothing is missing but the last row's logits
            self.target.truncate(len(self.tokens) - 1)
        if drafter is not None:
            # Tokens of a plain turn have no taps: run them again, the drafter's context must have no hole.
            self.target.truncate(drafter.observed)
            drafter.truncate(self.target.length)
        chunk, failure = min(chunk, self.target.engine.most_rows or chunk), None
        missing = self.tokens[self.target.length :]
        for at in range(0, len(missing), chunk):
            check()
            rows = missing[at : at + chunk]
            forward = self.target.forward(rows, np.array([len(rows) - 1]), taps=drafter is not None)
            self.target.commit(len(rows))
            if drafter is not None and forward.taps is not None:
                try:
                    drafter.observe(forward.taps)
                except DraftError as error:
                    drafter.reset()
                    drafter, failure = None, str(error)
        return forward.logits[-1], failure
