"""Stage 4, commit: keep the rows of the anchor and the accepted drafts, void the rest.

Of attention caches a prefix of the verified rows is kept by length alone: no row is copied. Recurrent layers cannot
forget rows, so the verify gives their state after each of its last rows, and the one behind the last kept row is
copied. Either way nothing is run again, and a round costs exactly one target forward.

Where a state was not given, the one before the verify is still there, and the kept tokens run again one by one, as in
plain decoding (rollback and replay).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dspark.runtime.engines.base import Rows, join_rows
from dspark.runtime.target import Target
from dspark.runtime.verify import Verdict

Kind = Literal["full", "partial", "replay"]


@dataclass(frozen=True)
class Commit:
    kind: Kind  # full: every verified row was kept; partial: a prefix of them; replay: tokens ran one at a time
    taps: Rows | None  # fp32 [n+1, m*H] of the kept rows; valid until the target's next forward


def commit(target: Target, verdict: Verdict) -> Commit:
    """Advance the target's length by the n+1 kept rows."""
    kept = verdict.accepted + 1
    if verdict.stepwise:
        return Commit("replay", verdict.taps)
    if not target.can_commit(kept):
        return Commit("replay", replay(target, target.ran[:kept], taps=verdict.taps is not None))
    target.commit(kept)
    kind: Kind = "full" if verdict.accepted == verdict.verified else "partial"
    return Commit(kind, None if verdict.taps is None else verdict.taps[:kept])


def replay(target: Target, tokens: Sequence[int], *, taps: bool) -> Rows | None:
    """Run and commit `tokens` one at a time; their taps."""
    rows = []
    for token in tokens:
        forward = target.forward([token], np.zeros(1, np.int64), taps=taps)
        if forward.taps is not None:
            rows.append(forward.taps.copy())
        target.commit(1)
    return join_rows(rows) if rows else None
