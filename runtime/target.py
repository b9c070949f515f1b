"""One request's side of the target: its engine, and how many rows of the K/V cache are committed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dspark.errors import UsageError
from dspark.runtime.engines.base import Engine, Rows

PAGES = np.zeros((1, 1), np.int32)  # one request: page 0 holds all its rows


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

    def __init__(self, engine: Engine, limit: int):
        """limit: the context limit, the largest `length` that the request may reach."""
        self.engine = engine
        self.limit = limit
        self.length = 0
        self.steps = 0  # forwards so far
        self._written = 0  # the end of all rows that were written since the first one was
        self.ran: list[int] = []  # the last forward's tokens

    def forward(self, tokens: Sequence[int], logit_rows: np.ndarray, *, taps: bool = True) -> Forward:
        """Run T tokens that follow the committed ones; their K/V rows are written but not yet committed.

        Token i gets position `length` + i. logit_rows int64 [L]: the rows whose next-token logits are wanted.
        UsageError for more tokens than the engine takes at once.
        """
        rows, most = len(tokens), self.engine.most_rows
        if most is not None and rows > most:
            raise UsageError(
                f"target: {rows} tokens in one run, its windowed caches take up to {most}; run them in pieces"
            )
        self._written = max(self._written, self.length + rows)
        self.ran = list(tokens)
        self.steps += 1
        outputs = self.engine.run(
            {
                "tokens": np.asarray(tokens, np.int64),
                "positions": np.arange(self.length, self.length + rows),
                "row_start": np.array([0, rows], np.int32),
                "length": np.array([self.length], np.int32),
                "pages": PAGES,
                "logit_rows": logit_rows,
            },
            ("logits", "taps") if taps else ("logits",),
        )
        return Forward(outputs["logits"], outputs.get("taps"))

    def can_commit(self, kept: int) -> bool:
        """Whether the state behind the last forward's first `kept` rows is there, or has to be made by running them."""
        return not self.engine.slots or len(self.ran) - kept < self.engine.slots

    def commit(self, kept: int) -> None:
        """Of the last forward's rows, the first `kept` stay; `can_commit` must hold."""
        self.engine.keep(kept)
        self.length += kept

    def truncate(self, rows: int) -> None:
        """Keep the first `rows` committed rows; none of them where rings have lost rows that their windows reach, or
        where recurrent layers remember more rows than these."""
        most, rows = self.engine.most_rows, min(self.length, rows)
        in_rings = most is None or self._written - rows <= most
        in_states = rows == self.length or not self.engine.slots
        self.length = rows if in_rings and in_states else 0
        if self.length == 0:
            self._written = 0
