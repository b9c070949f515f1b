"""Parity: every exported graph against the torch models, on a scripted session, through Polygraphy's comparator.

A graph whose outputs leave the tolerance fails the export. The report (parity.json) has, per graph and output, the
largest absolute and relative error, over all rows and per block position; logits also have their top-1 agreement.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dspark.errors import DSparkError
from dspark.export.parity_replay import Arrays, replay
from dspark.export.parity_script import Step

if TYPE_CHECKING:  # it needs torch
    from dspark.export.parity_reference import Heads

REPORT = "parity.json"
PROMPT = "prompt"  # the position of rows that belong to no block
# (absolute, relative): an element passes if its error is within either. fp32 graphs group their sums in another order
# than torch does; that costs 1e-4 on logits of a real model, and 5e-2 on taps whose values pass 1000.
TOLERANCE = {"logits": (1e-3, 1e-3), "taps": (1e-3, 1e-3), "draft_logits": (1e-3, 1e-3), "confidence": (1e-4, 0.0)}
EXACT = (0.0, 0.0)
# Two logits closer than this may swap places within the tolerance above: whichever token wins is right.
NEAR_TIE = 2e-3
# By output: (absolute, relative) as above; or a number, and the mean error of every position must be within that share
# of the mean magnitude: in short formats single elements are off by much where the values have spikes.
Tolerance = Mapping[str, tuple[float, float] | float]


class Rows:
    """Rows of a graph's outputs, by output and block position: what was expected, and what the graph gave."""

    def __init__(self) -> None:
        self.expected: dict[str, list[np.ndarray]] = {}
        self.found: dict[str, list[np.ndarray]] = {}

    def add(self, output: str, expected: np.ndarray, found: np.ndarray, prompt: bool = False) -> None:
        """Rows [n, ...] of one turn: row k is position k of its block, unless they are a prompt's."""
        if prompt:
            self._add(f"{output}@{PROMPT}", expected, found)
            return
        for k in range(len(expected)):
            self._add(f"{output}@{k}", expected[k : k + 1], found[k : k + 1])

    def _add(self, name: str, expected: np.ndarray, found: np.ndarray) -> None:
        self.expected.setdefault(name, []).append(expected)
        self.found.setdefault(name, []).append(found)


@dataclass
class Ranking:
    """How often the graph's best token is the reference's, over the rows of one logits output."""

    near_tie: float = NEAR_TIE
    rows: int = 0
    equal: int = 0
    near_ties: int = 0

    def count(self, expected: np.ndarray, found: np.ndarray) -> np.ndarray:
        """Compare logits [n, V]; returns whether each row's best token is right or a near-tie, bool [n]."""
        best = found.argmax(-1)
        equal = best == expected.argmax(-1)
        gap = expected.max(-1) - expected[np.arange(len(best)), best]
        tied = ~equal & (gap < self.near_tie)
        self.rows += len(best)
        self.equal += int(equal.sum())
        self.near_ties += int(tied.sum())
        return equal | tied


def check_target(
    form: str, file: Path, steps: list[Step], threads: int | None = None, window: int = 0
) -> dict[str, Any]:
    """The report on one target graph; `steps` hold the recorded reference. window: the graph's, 0 without rings."""
    rows, ranking = Rows(), Ranking()
    for turn, found in replay("target", form, file, steps, threads, window):
        ranking.count(turn.logits, found["logits"])
        rows.add("logits", turn.logits, found["logits"], turn.prompt)
        rows.add("taps", turn.taps, found["taps"], turn.prompt)
    return judge("target", form, rows, "logits", ranking)


def check_drafter(
    form: str, file: Path, steps: list[Step], heads: "Heads", threads: int | None = None
) -> dict[str, Any]:
    """The report on one drafter graph. Every position is judged given the tokens that the graph drafted before it."""
    rows, ranking = Rows(), Ranking()
    for turn, found in replay("drafter", form, file, steps, threads):
        logits, best, confidence = heads.follow(turn, found["draft_tokens"])
        scores = turn.scores(found["draft_logits"])
        right = ranking.count(turn.scores(logits), scores)
        # At a near-tie the graph's own best token is as right as the reference's.
        tokens = np.where(right, heads.token(scores.argmax(-1)), best)
        # As floats: the comparator divides by what it expected, and token 0 is an ordinary token.
        rows.add("draft_tokens", tokens.astype(float), found["draft_tokens"].astype(float))
        rows.add("draft_logits", logits, found["draft_logits"])
        if confidence is not None:
            rows.add("confidence", confidence, found["confidence"])
    return judge("drafter", form, rows, "draft_logits", ranking)


def write_report(graphs: list[dict[str, Any]], folder: Path) -> None:
    """Write parity.json, and fail if any graph failed.

    Raises DSparkError naming the graph, the output and how far off it is.
    """
    report = {
        "passed": all(graph["passed"] for graph in graphs),
        "comparator": f"polygraphy {metadata.version('polygraphy')} SimpleCompareFunc, elementwise",
        "reference": "torch, eager",
        "near_tie": NEAR_TIE,
        "graphs": graphs,
    }
    text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    (folder / REPORT).write_text(text, encoding="utf-8")
    for graph in graphs:
        for name, output in graph["outputs"].items():
            if not output["passed"]:
                error = output["max_abs_error"]
                raise DSparkError(
                    f"parity failed: {graph['role']} graph, form {graph['form']}, output {name!r} is off by"
                    f" {'NaN' if error is None else f'{error:.3g}'} (tolerance {output['atol']:g}); nothing was kept"
                )


def judge(
    role: str, form: str, rows: Rows, ranked: str, ranking: Ranking, tolerance: Tolerance | None = None
) -> dict[str, Any]:
    """The report on one graph. ranked: the output whose best tokens `ranking` counted. tolerance: None takes that of
    fp32."""
    tolerance = TOLERANCE if tolerance is None else tolerance
    outputs: dict[str, dict[str, Any]] = {}
    for name, result in _compare(rows, tolerance):
        output, _, position = name.partition("@")
        allowed = tolerance.get(output, EXACT)
        limit = {"share": allowed} if isinstance(allowed, float) else {"atol": allowed[0], "rtol": allowed[1]}
        entry = outputs.setdefault(output, {**limit, **_nothing(), "positions": []})
        at = {"position": position if position == PROMPT else int(position), **_nothing()}
        entry["positions"].append(at)
        for counted in (entry, at):
            counted["passed"] &= bool(result)
            # The result is a bare False for outputs of different shapes.
            for key, error in (("max_abs_error", "max_absdiff"), ("max_rel_error", "max_reldiff")):
                counted[key] = _larger(counted[key], getattr(result, error, math.nan))
            if isinstance(allowed, float):
                share = getattr(result, "mean_absdiff", math.nan) / _magnitude(rows.expected[name])
                counted["mean_share"] = _larger(counted.get("mean_share", 0.0), share)
    entry = outputs[ranked]
    entry["top1_agreement"] = ranking.equal / ranking.rows
    entry["top1_near_ties"] = ranking.near_ties
    entry["passed"] &= ranking.equal + ranking.near_ties == ranking.rows
    return {"role": role, "form": form, "passed": all(e["passed"] for e in outputs.values()), "outputs": outputs}


def _nothing() -> dict[str, Any]:
    return {"passed": True, "max_abs_error": 0.0, "max_rel_error": 0.0}


def _larger(a: float | None, b: float) -> float | None:
    """The larger error, rounded up to two digits; None for one that is not finite, which JSON cannot hold."""
    if a is None or not math.isfinite(b):
        return None
    if b <= a:
        return a
    digit = 10.0 ** (math.floor(math.log10(b)) - 1)
    return float(f"{math.ceil(b / digit) * digit:.1e}")


def _magnitude(parts: list[np.ndarray]) -> float:
    return float(np.abs(np.concatenate(parts)).mean())


def _compare(rows: Rows, allowed: Tolerance) -> Iterable[tuple[str, Any]]:
    """Polygraphy's verdict on every output and position."""
    from polygraphy.comparator import Comparator, RunResults, SimpleCompareFunc
    from polygraphy.logger import G_LOGGER

    def joined(side: dict[str, list[np.ndarray]]) -> Arrays:
        return {name: np.concatenate(parts) for name, parts in side.items()}

    statistics, atol, rtol = {}, {}, {}
    for name, parts in rows.expected.items():
        of_output = allowed.get(name.partition("@")[0], EXACT)
        if isinstance(of_output, float):
            statistics[name], atol[name], rtol[name] = "mean", of_output * _magnitude(parts), 0.0
        else:
            statistics[name], (atol[name], rtol[name]) = "elemwise", of_output
    results = RunResults()
    results.add([joined(rows.found)], runner_name="found")
    results.add([joined(rows.expected)], runner_name="expected")
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):  # it logs to stdout, which belongs to --json
        compare = SimpleCompareFunc(check_error_stat=statistics, atol=atol, rtol=rtol)
        (accuracy,) = Comparator.compare_accuracy(results, compare_func=compare)
    ((iteration,),) = accuracy.values()
    return iteration.items()
