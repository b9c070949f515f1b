"""`--trace FILE`: one JSON line per round, with everything needed to replay it by hand."""

import json
import math
from collections.abc import Callable
from typing import TextIO

from dspark.runtime.loop import Round


def trace_line(index: int, done: Round) -> dict:
    """A round as JSON. `positions` are those of the verified rows: the anchor's, then the verified drafts'."""
    confidences = done.confidences
    if confidences is not None:
        confidences = [None if math.isnan(c) else c for c in confidences]  # type: ignore[misc]
    return {
        "round": index,
        "anchor": done.anchor,
        "drafts": done.drafts,
        "confidences": confidences,
        "verified": done.verified,
        "accepted": done.accepted,
        "emitted": done.emitted,
        "positions": list(range(done.position, done.position + done.verified + 1)),
        "target_length": list(done.target_length),
        "drafter_length": list(done.drafter_length),
        "draft_ms": round(done.draft_ms, 4),
        "verify_ms": round(done.verify_ms, 4),
        "engine_ms": round(done.engine_ms, 4),
        "total_ms": round(done.total_ms, 4),
    }


def tracer(file: TextIO) -> Callable[[Round], None]:
    """A callback for `on_round` that writes the rounds of one generation to `file`, as they happen."""
    count = 0

    def write(done: Round) -> None:
        nonlocal count
        file.write(json.dumps(trace_line(count, done)) + "\n")
        count += 1

    return write
