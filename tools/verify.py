"""A bundle's graphs against each other: the portable ones on ONNX Runtime are right, the others are held to them.

The session is the export's own (export/parity_script.py), the comparator Polygraphy's. What runs is what the runtime
would run: its engines, one request after the other, in caches that they update in place. No torch.
"""

from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any

import numpy as np

from dspark.errors import DSparkError, UsageError
from dspark.export import parity
from dspark.export.parity_replay import Arrays, committed_alone, drafter_feeds, replay, target_feeds
from dspark.export.parity_script import Step, Turn, script
from dspark.runtime.bundle import Bundle
from dspark.runtime.engines.base import Engine
from dspark.runtime.engines.open import ONNXRUNTIME, open_engines

ROLES = ("target", "drafter")
PAGES = np.zeros((2, 1), np.int32)  # each request on a linear cache of its own
# By an engine's number format, with the near-tie of its logits. fp32 is what the export is held to. Measured with torch
# on the demo pair: bf16 has mean errors of up to 1.7 % of the logits' mean magnitude and 4.4 % of the taps', fp16 a
# tenth of that; logits of another row are off by 29 %. In bf16 the best token changed where two logits were 0.28 apart.
OUTPUTS = ("logits", "taps", "draft_logits", "confidence")
TOLERANCE: dict[str, tuple[parity.Tolerance, float]] = {
    "fp32": (parity.TOLERANCE, parity.NEAR_TIE),
    "fp16": (dict.fromkeys(OUTPUTS, 0.02), 0.2),
    "bf16": (dict.fromkeys(OUTPUTS, 0.08), 1.0),
}


def backends_of(bundle: Bundle) -> list[str]:
    """Every backend that the bundle has something for."""
    return [ONNXRUNTIME, *dict.fromkeys(engine.backend for engine in bundle.manifest.engines)]


def verify(
    bundle: Bundle,
    backends: Sequence[str],
    progress: Callable[[str], None],
    *,
    required: bool,
    threads: int | None = None,
) -> dict[str, Any]:
    """The report: {"passed", "graphs": [...], "skipped": {backend: why}, ...}; graphs as in parity.json.

    required: a backend that cannot run here is an error (DSparkError) and not skipped.
    """
    spec = bundle.manifest.drafter
    steps = script(bundle.manifest.target.vocab_size, spec.block_size, spec.draft_vocab_size)
    progress("running the portable graphs")
    drafts = _record(bundle, steps, threads)
    turns = sorted((turn for step in steps for turn in step), key=lambda turn: turn.request)
    limit = bundle.manifest.profiles.max_context_len
    turns = [turn for turn in turns if turn.length + len(turn.tokens) <= limit]
    if not turns:
        raise UsageError(f"nothing can be compared within {limit} tokens: export it with a larger --max-context-len")
    graphs, skipped = [], {}
    for backend in backends:
        progress(f"comparing {backend}")
        try:
            target, drafter = open_engines(bundle, ROLES, backend, limit, threads)
        except DSparkError as error:
            if required:
                raise
            skipped[backend] = str(error)
            continue
        graphs.append(_check_target(target, backend, turns, spec.block_size + 1))
        graphs.append(_check_drafter(drafter, backend, turns, drafts))
    return {
        "passed": all(graph["passed"] for graph in graphs),
        "comparator": f"polygraphy {metadata.version('polygraphy')} SimpleCompareFunc",
        "reference": "portable graphs on ONNX Runtime, CPU",
        "graphs": graphs,
        "skipped": skipped,
    }


def _record(bundle: Bundle, steps: list[Step], threads: int | None) -> dict[int, Arrays]:
    """Fill in the turns from the portable graphs; returns the drafter's outputs by the turn's identity."""
    manifest, drafts = bundle.manifest, {}
    files = {role: bundle.path(manifest.graph(role, "portable").file) for role in ROLES}
    for turn, found in replay("target", "portable", files["target"], steps, threads):
        turn.logits, turn.taps = found["logits"], found["taps"]
        turn.block = np.full(turn.block_rows, manifest.drafter.mask_token_id, np.int64)
        turn.block[0] = turn.logits[turn.commit - 1].argmax()
    for turn, found in replay("drafter", "portable", files["drafter"], steps, threads):
        drafts[id(turn)] = found
    return drafts


def _run(engine: Engine, feeds: Callable, turns: Sequence[Turn], fetch: Sequence[str]) -> Iterator[tuple[Turn, Arrays]]:
    for turn in turns:
        outputs = engine.run(feeds([turn], PAGES), fetch)
        yield turn, {name: np.array(value) for name, value in outputs.items()}
        if engine.slots:
            kept = committed_alone(turn)
            if len(turn.tokens) - turn.commit >= engine.slots:
                engine.run(feeds([kept], PAGES), ())
            engine.keep([turn.commit])


def _settings(engine: Engine) -> tuple[str, parity.Tolerance, float]:
    dtype = getattr(getattr(engine, "built", None), "dtype", "fp32")
    return dtype, *TOLERANCE[dtype]


def _check_target(engine: Engine, backend: str, turns: Sequence[Turn], most: int) -> dict[str, Any]:
    """most: of how many rows an engine gives logits; of a prompt's those are the last ones."""
    dtype, tolerance, near_tie = _settings(engine)
    rows, ranking = parity.Rows(), parity.Ranking(near_tie)

    def feeds(step: Step, pages: np.ndarray) -> Arrays:
        made = target_feeds(step, pages)
        return made | {"logit_rows": made["logit_rows"][-most:]}

    for turn, found in _run(engine, feeds, turns, ("logits", "taps")):
        ranking.count(turn.logits[-most:], found["logits"])
        for name, expected in (("logits", turn.logits[-most:]), ("taps", turn.taps)):
            rows.add(name, expected, found[name], turn.prompt)
    return parity.judge("target", f"{backend} {dtype}", rows, "logits", ranking, tolerance)


def _check_drafter(engine: Engine, backend: str, turns: Sequence[Turn], drafts: dict[int, Arrays]) -> dict[str, Any]:
    """Positions are compared up to the first draft that differs: what follows it answers another question."""
    dtype, tolerance, near_tie = _settings(engine)
    rows, ranking = parity.Rows(), parity.Ranking(near_tie)
    fetch = tuple(name for name in next(iter(drafts.values())) if "_cache" not in name)
    for turn, found in _run(engine, drafter_feeds, turns, fetch):
        expected = drafts[id(turn)]
        found = {name: value[0] for name, value in found.items()}  # one request
        differ = np.flatnonzero(found["draft_tokens"] != expected["draft_tokens"])
        end = len(turn.block) if not len(differ) else int(differ[0]) + 1
        ours, theirs = found["draft_tokens"][:end], expected["draft_tokens"][:end]
        wanted, scores = (turn.scores(side["draft_logits"][:end]) for side in (expected, found))
        right = ranking.count(wanted, scores)
        same = scores.argmax(-1) == wanted.argmax(-1)
        # At a near-tie the engine's own best token is as right as the reference's.
        rows.add("draft_tokens", np.where(right & ~same, ours, theirs).astype(float), ours.astype(float))
        for name in fetch[1:]:
            rows.add(name, expected[name][:end], found[name][:end])
    return parity.judge("drafter", f"{backend} {dtype}", rows, "draft_logits", ranking, tolerance)
