"""Stage 3, verify: one target forward over the anchor and the scheduled drafts decides what is kept.

Row k of the forward predicts the token after draft k (row 0: after the anchor). Greedy acceptance takes drafts while
they equal the target's argmax; the first argmax that differs, or the one after the last draft, is the extra token.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from dspark.runtime.engines.base import Rows
from dspark.runtime.target import Target


@dataclass(frozen=True)
class Verdict:
    """n of l drafts were accepted."""

    verified: int  # l
    accepted: int  # n
    extra: int | None  # correction or bonus token, the next anchor; None: an accepted stop token ends the text
    taps: Rows | None  # fp32 [l+1, m*H] of anchor, x1..xl; valid until the target's next forward


def verify(target: Target, anchor: int, drafts: Sequence[int], stops: Collection[int], *, taps: bool = True) -> Verdict:
    """Judge `drafts` after `anchor` with one target forward. Only the last draft may be one of the `stops`.

    taps=False leaves the hidden states in the engine (no drafter will want them).
    """
    forward = target.forward([anchor, *drafts], np.arange(len(drafts) + 1), taps=taps)
    accepted, extra = accept_greedy(drafts, forward.logits)
    ended = accepted > 0 and drafts[accepted - 1] in stops
    return Verdict(len(drafts), accepted, None if ended else extra, forward.taps)


def accept_greedy(drafts: Sequence[int], logits: np.ndarray) -> tuple[int, int]:
    """(accepted, extra token) for drafts [l] and target logits fp32 [l+1, V]; ties go to the lowest token."""
    best = logits.argmax(axis=-1).tolist()
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == best[accepted]:
        accepted += 1
    return accepted, best[accepted]
