"""The two diagrams of `dspark bench --concurrency`; matplotlib comes with '.[plot]'."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

MISSING = "the diagrams are left out: matplotlib is not installed; run pip install '.[plot]'"
FRONTIER, BUDGET = "frontier.png", "budget.png"


def lines(points: Sequence[dict], x: str, y: str) -> dict[str, list[tuple[float, float, int]]]:
    """By setting: (x, y, concurrency) of the points of `concurrency.report` that have both."""
    found: dict[str, list[tuple[float, float, int]]] = {}
    for point in points:
        if point[x] is not None and point[y] is not None:
            found.setdefault(point["setting"], []).append((point[x], point[y], point["concurrency"]))
    return found


def draw(points: Sequence[dict], folder: Path) -> None:
    """Tokens per second of all requests over those of one (DSpark, figure 7), and verified drafts per request and round
    over the number of requests (figure 8): two PNG in `folder`. ModuleNotFoundError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.6), layout="constrained")
    axes = figure.add_subplot()
    for name, found in lines(points, "tokens_per_second_per_user", "tokens_per_second").items():
        x, y, concurrencies = zip(*found, strict=True)
        (line,) = axes.plot(x, y, "o-", linewidth=1, markersize=4, alpha=0.8, label=name)
        text: dict[str, Any] = {"textcoords": "offset points", "fontsize": 6, "color": line.get_color()}
        for at, up, concurrency in zip(x, y, concurrencies, strict=True):
            axes.annotate(str(concurrency), (at, up), xytext=(4, 3), **text)
    axes.set(xlabel="tokens per second of a request", ylabel="tokens per second of all requests", xlim=(0, None))
    axes.set(ylim=(0, None), title="numbers: requests at once")
    axes.legend(fontsize=8)
    figure.savefig(folder / FRONTIER, dpi=120, format="png")

    figure = Figure(figsize=(6.4, 4.6), layout="constrained")
    axes = figure.add_subplot()
    for name, found in lines(points, "concurrency", "verified_per_round").items():
        x, y, _ = zip(*found, strict=True)
        axes.plot(x, y, "o-", linewidth=1, markersize=4, alpha=0.8, label=name)
    ticks = sorted({point["concurrency"] for point in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, labels=[str(tick) for tick in ticks])
    axes.set(xlabel="requests at once", ylabel="verified drafts per request and round", ylim=(-0.1, None))
    axes.legend(fontsize=8)
    figure.savefig(folder / BUDGET, dpi=120, format="png")
