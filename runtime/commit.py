"""Stage 4, commit: keep the rows of the anchor and the accepted drafts, void the rest.

The target's caches are attention caches, so a prefix of the verified rows is kept by length alone: no row is copied,
nothing is run again, and a round costs exactly one target forward.
"""

from dataclasses import dataclass
from typing import Literal

from dspark.runtime.engines.base import Rows
from dspark.runtime.target import Target
from dspark.runtime.verify import Verdict

Kind = Literal["full", "partial"]


@dataclass(frozen=True)
class Commit:
    kind: Kind  # full: every verified row was kept; partial: a prefix of them
    taps: Rows | None  # fp32 [n+1, m*H] of the kept rows; valid until the target's next forward


def commit(target: Target, verdict: Verdict) -> Commit:
    """Advance the target's length by the n+1 kept rows."""
    kept = verdict.accepted + 1
    target.length += kept
    kind: Kind = "full" if verdict.accepted == verdict.verified else "partial"
    return Commit(kind, None if verdict.taps is None else verdict.taps[:kept])
