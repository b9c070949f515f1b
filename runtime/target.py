"""One request's side of the target: its engine, and how many rows of the K/V cache are committed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dspark.runtime.engines.base import Engine, Rows

PAGES = np.zeros((1, 1), np.int32)  # one request on a linear cache: page 0 holds all its rows


@dataclass(frozen=True)
class Forward:
    """What a target forward over T rows says. Both arrays are only valid until the target's next forward."""

    logits: np.ndarray  # fp32 [L, V], of the rows asked for
    taps: Rows | None  # fp32 [T, m*H]: the tapped hidden states, or None where not asked for


class Target:
    """The target model for one request. `length` counts the committed cache rows, one per token."""

    def __init__(self, engine: Engine, limit: int):
        """limit: the context limit, the largest `length` that the request may reach."""
        self.engine = engine
        self.limit = limit
        self.length = 0

    def forward(self, tokens: Sequence[int], logit_rows: np.ndarray, *, taps: bool = True) -> Forward:
        """Run T tokens that follow the committed ones; their K/V rows are written but not yet committed.

        Token i gets position `length` + i. logit_rows int64 [L]: the rows whose next-token logits are wanted.
        """
        rows = len(tokens)
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
