"""A request's side of the target: its place in the engine, and how many rows of the K/V cache are committed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dspark.errors import UsageError
from dspark.runtime.engines.base import Engine, Rows


@dataclass(frozen=True)
class Forward:
    """What a target forward over T rows says. Both arrays are only valid until the target's next forward."""

    logits: np.ndarray  # fp32 [L, V], of the rows asked for
    taps: Rows | None  # fp32 [T, m*H]: the tapped hidden states, or None where not asked for


class Target:
    """The target model for one request. `length` counts the committed cache rows, one per token.

    Caches of windowed layers may be rings, in which a row takes the place of one that no window reaches any more. That
    holds as long as no row is written further than `engine.most_rows` behind the committed ones.
    """

    def __init__(self, engine: Engine, limit: int, place: int = 0):
        """limit: the context limit, the largest `length` that the request may reach. place: in the engine."""
        self.engine = engine
        self.limit = limit
        self.place = place
        self.length = 0
        self.steps = 0  # forwards so far
        self._written = 0  # the end of all rows that were written since the first one was
        self.ran: list[int] = []  # the last forward's tokens

    def forward(self, tokens: Sequence[int], logit_rows: np.ndarray, *, taps: bool = True) -> Forward:
        """`forward_all` of this request alone."""
        return forward_all([self], [tokens], [logit_rows], taps=taps)[0]

    def can_commit(self, kept: int) -> bool:
        """Whether the state behind the last forward's first `kept` rows is there, or has to be made by running them."""
        return not self.engine.slots or len(self.ran) - kept < self.engine.slots

    def commit(self, kept: int) -> None:
        """`commit_all` of a forward of this request alone."""
        commit_all([self], [kept])

    def truncate(self, rows: int) -> None:
        """Keep the first `rows` committed rows; none of them where rings have lost rows that their windows reach, or
        where recurrent layers remember more rows than these."""
        most, rows = self.engine.most_rows, min(self.length, rows)
        in_rings = most is None or self._written - rows <= most
        in_states = rows == self.length or not self.engine.slots
        self.length = rows if in_rings and in_states else 0
        if self.length == 0:
            self._written = 0


def forward_all(
    targets: Sequence[Target],
    tokens: Sequence[Sequence[int]],
    logit_rows: Sequence[np.ndarray],
    *,
    taps: bool = True,
) -> list[Forward]:
    """One run of the engine that all requests share: of each, the tokens that follow its committed ones.

    Token i of a request gets position `length` + i; K/V rows are written but not yet committed. logit_rows int64 [L],
    by request: the rows whose next-token logits are wanted. UsageError for more tokens of one request than the engine
    takes at once.
    """
    engine, counts = targets[0].engine, [len(each) for each in tokens]
    for count in counts:
        if engine.most_rows is not None and count > engine.most_rows:
            raise UsageError(
                f"target: {count} tokens in one run, its windowed caches take up to {engine.most_rows}; run them in"
                " pieces"
            )
    for target, each in zip(targets, tokens, strict=True):
        target._written = max(target._written, target.length + len(each))
        target.ran = list(each)
        target.steps += 1
    starts = np.cumsum([0, *counts])
    positions = [np.arange(target.length, target.length + count) for target, count in zip(targets, counts, strict=True)]
    outputs = engine.run(
        {
            "tokens": np.concatenate([np.asarray(each, np.int64) for each in tokens]),
            "positions": np.concatenate(positions),
            "row_start": starts.astype(np.int32),
            "length": np.array([target.length for target in targets], np.int32),
            "pages": np.array([[target.place] for target in targets], np.int32),
            "logit_rows": np.concatenate([at + rows for at, rows in zip(starts, logit_rows, strict=False)]),
        },
        ("logits", "taps") if taps else ("logits",),
    )
    logits, every_tap = outputs["logits"], outputs.get("taps")
    ends = np.cumsum([0, *(len(rows) for rows in logit_rows)])
    return [
        Forward(logits[ends[i] : ends[i + 1]], None if every_tap is None else every_tap[starts[i] : starts[i + 1]])
        for i in range(len(targets))
    ]


def commit_all(targets: Sequence[Target], kept: Sequence[int]) -> None:
    """Of each request's rows in the last run, which had just these, the first `kept` stay; `can_commit` must hold."""
    targets[0].engine.keep(kept)
    for target, count in zip(targets, kept, strict=True):
        target.length += count
