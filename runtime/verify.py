"""Stage 3, verify: one target forward over the anchor and the scheduled drafts decides what is kept.

Row k of the forward predicts the token after draft k (row 0: after the anchor). A rule says, row by row, which token
comes next; while that is the draft, the next row counts too. So every token is chosen from the row of a text that is
the output's, once, in order, and plain decoding is the round without drafts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dspark.errors import UsageError
from dspark.runtime.draft import Draft
from dspark.runtime.engines.base import Rows, join_rows
from dspark.runtime.random import ACCEPT, COUPLED, DRAFT, TARGET, Streams, TokenBlocks
from dspark.runtime.sampling import (
    Law,
    LogitProcessor,
    LogProbs,
    Penalties,
    Sampling,
    greedy,
    law_of,
    log_probs,
)
from dspark.runtime.target import Forward, Target

RULES = ("exact", "coupled", "opportunistic")


class Cancelled(Exception):
    """The generation was cancelled; what had been decided before stays, and nothing else is."""


@dataclass(frozen=True)
class Verdict:
    """n of l drafts were accepted."""

    verified: int  # l
    accepted: int  # n
    extra: int | None  # correction or bonus token, the next anchor; None: an accepted draft ends the text
    taps: Rows | None  # fp32 [l+1, m*H] of anchor, x1..xl (stepwise: up to xn); valid until the target's next forward
    stepwise: bool = False  # the kept rows are committed already

    def emitted(self, proposal: Draft) -> list[int]:
        """The accepted drafts, then the extra token unless a draft ends the text."""
        return proposal.tokens[: self.accepted] + ([] if self.extra is None else [self.extra])


def verify(
    target: Target,
    anchor: int,
    proposal: Draft,
    length: int,
    judge: "Judge",
    ends: Callable[[int], bool],
    *,
    taps: bool = True,
    stepwise: bool = False,
    check: Callable[[], None] = lambda: None,
) -> Verdict:
    """Judge the first `length` drafts after `anchor` with one target forward.

    ends: told every token that is kept, in order; True: the text ends with it. taps=False leaves the hidden states in
    the engine (no drafter will want them). stepwise: a forward for each token instead, as plain decoding does, and so
    with its rounding. check: called when the target has run and nothing is decided yet; may raise Cancelled.
    """
    if stepwise:
        before = target.length
        try:
            return _verify_stepwise(target, anchor, proposal, length, judge, ends, taps, check)
        except BaseException:
            target.truncate(before)  # rows of tokens that nobody gets
            raise
    forward = target.forward([anchor, *proposal.tokens[:length]], np.arange(length + 1), taps=taps)
    check()
    return decide(forward, target.length + 1, proposal, length, judge, ends)


def decide(
    forward: Forward, first: int, proposal: Draft, length: int, judge: "Judge", ends: Callable[[int], bool]
) -> Verdict:
    """The verdict on the first `length` drafts, whose rows the forward has behind their anchor's. first: the position
    of the token after the anchor."""
    for k in range(length + 1):
        draft = proposal.tokens[k] if k < length else None
        token = judge.choose(forward.logits[k], first + k, draft, _logits(proposal, k, draft))
        if ends(token) or token != draft:
            break
    same = token == draft
    return Verdict(length, k + same, None if same else token, forward.taps)


def _verify_stepwise(target, anchor, proposal, length, judge, ends, taps, check) -> Verdict:
    drafts: list[int | None] = [*proposal.tokens[:length], None]
    # As in plain decoding the last token has no row yet, a draft that ends the text included: it counts as the extra.
    token, rows = anchor, []
    for k, draft in enumerate(drafts):
        forward = target.forward([token], np.zeros(1, np.int64), taps=taps)
        try:
            check()
        except Cancelled:
            if k == 0:
                raise
            k -= 1  # what was decided stays; this forward is void
            break
        if forward.taps is not None:
            rows.append(forward.taps.copy())
        token = judge.choose(forward.logits[0], target.length + 1, draft, _logits(proposal, k, draft))
        target.commit(1)
        if ends(token) or token != draft:
            break
    return Verdict(len(drafts) - 1, k, token, join_rows(rows) if rows else None, stepwise=True)


def _logits(proposal: Draft, k: int, draft: int | None) -> np.ndarray | None:
    return None if proposal.logits is None or draft is None else proposal.logits[k]


def _checked(row: object, shape: tuple[int, ...]) -> np.ndarray:
    """What a logit processor returned; UsageError where that is no row of logits."""
    if not isinstance(row, np.ndarray) or row.shape != shape or row.dtype.kind != "f":
        found = f"{row.dtype} {list(row.shape)}" if isinstance(row, np.ndarray) else type(row).__name__
        raise UsageError(f"a logit processor returned {found}: it must return the logits, floats {list(shape)}")
    return row


class Draws:
    """The random decisions of a request. Exact enumeration in the tests replaces this class, and nothing else."""

    def __init__(self, streams: Streams):
        self.streams = streams
        self._shared: dict[int, np.ndarray] = {}  # position -> noise of all draft tokens, for coupled drafts

    def accepts(self, p: float, q: float, position: int) -> bool:
        """True with probability min(1, p / q)."""
        return self.streams.uniform(ACCEPT, position) * q < p

    def token(self, law: Law, position: int) -> int:
        return law.draw(self.streams.uniform(TARGET, position))

    def race(self, law: Law, position: int) -> int:
        """A draw by the noise that coupled drafts share."""
        return law.race(lambda tokens: self.streams.gumbel(COUPLED, position, TokenBlocks.of(tokens)))

    def fresh_noise(self, first: int, count: int, round: int, size: int) -> np.ndarray:
        """Noise fp32 [count, size] for drafts at the positions from `first` on, by draft index; new in every round."""
        rows = [self.streams.gumbel(DRAFT, first + k, size, round) for k in range(count)]
        return np.array(rows, np.float32)

    def shared_noise(self, first: int, count: int, tokens: TokenBlocks | int) -> np.ndarray:
        """Noise fp32 [count, n] of the draft tokens (or of 0..n-1), which is `race`'s at the same position."""
        # What was drafted and not kept is drafted again, with the same noise.
        self._shared = {at: noise for at, noise in self._shared.items() if at >= first}
        for position in range(first, first + count):
            if position not in self._shared:
                noise = self.streams.gumbel(COUPLED, position, tokens)
                self._shared[position] = noise.astype(np.float32)
        return np.stack([self._shared[position] for position in range(first, first + count)])


@dataclass(frozen=True)
class DraftVocabulary:
    """Which tokens a drafter can propose."""

    size: int
    tokens: np.ndarray | None = None  # int64 [size]: draft index -> token; None: they are the same
    indices: np.ndarray | None = None  # int64 [V]: token -> draft index, -1 for none
    blocks: TokenBlocks | None = None  # of tokens

    @classmethod
    def of(cls, tokens: np.ndarray, vocab_size: int) -> "DraftVocabulary":
        indices = np.full(vocab_size, -1, np.int64)
        indices[tokens] = np.arange(len(tokens))
        return cls(len(tokens), tokens, indices, TokenBlocks.of(tokens))


class Judge:
    """Says which token comes next, for one generation; how drafts are to be drawn is the other half of the same rule.

    - greedy (temperature 0): the argmax.
    - exact: a draft x, drawn from q, is kept with probability min(1, p(x) / q(x)), else the token is drawn from the
      residual max(p - q, 0) (Leviathan et al. 2023, algorithm 1). A draft that is an argmax has all of q.
    - coupled: argmax(log p + g), with noise g by position alone. Drafts are argmax(log q + g) with the same g (Daliri,
      Musco, Suresh 2024): whatever is drafted, the output is what plain decoding with this seed gives.
    - opportunistic: a draft is kept if it is the argmax, else the token is drawn. NOT the target's distribution.
    """

    def __init__(
        self,
        sampling: Sampling,
        rule: str,
        draws: Draws,
        vocabulary: DraftVocabulary,
        tokens: Sequence[int],
        *,
        draft_temperature: float = 0.0,
        processors: Sequence[LogitProcessor] = (),
        logprobs: int | None = None,
    ):
        """tokens: everything so far. draft_temperature: that drafts are drawn at; 0: argmax.
        logprobs: keep log-probabilities, and those of so many likeliest tokens."""
        self.sampling = sampling
        self.rule = rule
        self.draws = draws
        self.vocabulary = vocabulary
        self.draft_temperature = draft_temperature
        self.logprobs: list[LogProbs] = []  # of the tokens chosen, in order, where they are kept
        self._keep = logprobs
        self._tokens = list(tokens)
        self._processors: list[LogitProcessor] = [
            *([Penalties(sampling, tokens)] if Penalties.wanted(sampling) else []),
            *processors,
        ]

    def drafting(self, first: int, count: int, round: int) -> dict:
        """How to draft `count` tokens for the positions from `first` on: arguments for Drafter.propose."""
        if self.draft_temperature == 0:
            return {}
        if self.rule == "coupled":
            noise = self.draws.shared_noise(first, count, self.vocabulary.blocks or self.vocabulary.size)
            return {"temperature": self.draft_temperature, "noise": noise}
        noise = self.draws.fresh_noise(first, count, round, self.vocabulary.size)
        return {"temperature": self.draft_temperature, "noise": noise, "read_logits": True}

    def choose(
        self, logits: np.ndarray, position: int, draft: int | None = None, draft_logits: np.ndarray | None = None
    ) -> int:
        """The token at `position`, from the target's logits [V] there.

        draft: what was proposed for it. draft_logits [Vd]: it was drawn from their softmax at the draft temperature;
        None: it is their argmax. DSparkError where no token can be chosen.
        """
        row = logits.copy() if self._processors else logits
        for process in self._processors:
            row = _checked(process(self._tokens, row), logits.shape)
        token = self._next(row, position, draft, draft_logits)
        self._tokens.append(token)
        if self._keep is not None:
            self.logprobs.append(log_probs(logits, token, self._keep))
        return token

    def _next(self, logits: np.ndarray, position: int, draft: int | None, draft_logits: np.ndarray | None) -> int:
        if self.sampling.temperature == 0:
            return greedy(logits)
        if self.rule == "opportunistic" and draft is not None and draft == greedy(logits):
            return draft
        law = law_of(logits, self.sampling)
        if self.rule == "coupled":
            return self.draws.race(law, position)
        if self.rule == "exact" and draft is not None:
            return self._accept_or_redraw(law, position, draft, draft_logits)
        return self.draws.token(law, position)

    def _accept_or_redraw(self, law: Law, position: int, draft: int, draft_logits: np.ndarray | None) -> int:
        if draft_logits is None:
            q, weights = 1.0, (law.tokens == draft).astype(np.float64)
        else:
            index = draft if self.vocabulary.indices is None else int(self.vocabulary.indices[draft])
            if index < 0:  # no token of the drafter's: nobody knows what it was drawn from
                return self.draws.token(law, position)
            indices = law.tokens if self.vocabulary.indices is None else self.vocabulary.indices[law.tokens]
            scaled = draft_logits / draft_logits.dtype.type(self.draft_temperature)
            scaled -= scaled.max()
            drawn = np.exp(scaled, out=scaled)
            total = float(drawn.sum())
            if not np.isfinite(total):  # a broken drafter: nobody knows what it drew from, so nothing is accepted
                return self.draws.token(law, position)
            q, weights = float(drawn[index]) / total, np.where(indices < 0, 0, drawn[indices]) / total
        if self.draws.accepts(law.of(draft), q, position):
            return draft
        return self.draws.token(law.without(weights), position)
