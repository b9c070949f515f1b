"""The reliability diagram of a calibration; matplotlib comes with '.[plot]'."""

import math
from collections.abc import Sequence
from pathlib import Path

MISSING = "the reliability diagram is left out: matplotlib is not installed; run pip install '.[plot]'"
COLOURS = {"before": "tab:orange", "after": "tab:blue"}


def draw(positions: Sequence[dict], file: Path) -> None:
    """A panel for each position of `calibration.assess`: share of survivals over estimated probability, as a PNG.

    A point is a bin. ModuleNotFoundError without matplotlib.
    """
    from matplotlib.figure import Figure

    columns = min(4, len(positions))
    rows = math.ceil(len(positions) / columns)
    figure = Figure(figsize=(3.1 * columns, 3.3 * rows), layout="constrained")
    for index, position in enumerate(positions):
        axes = figure.add_subplot(rows, columns, index + 1)
        axes.plot([0, 1], [0, 1], color="0.6", linewidth=0.8)
        for name, colour in COLOURS.items():
            bins = position[name]["bins"]
            x, y = [b["probability"] for b in bins], [b["observed"] for b in bins]
            label = f"{name}: ECE {position[name]['ece']:.1%}"
            axes.plot(x, y, "o-", color=colour, linewidth=0.8, markersize=4, alpha=0.7, label=label)
        axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
        axes.set_title(f"draft {position['position']}, {position['rounds']} rounds", fontsize=9)
        axes.legend(fontsize=7, loc="upper left")
    figure.supxlabel("estimated chance that the prefix survives", fontsize=9)
    figure.supylabel("share that survived", fontsize=9)
    figure.savefig(file, dpi=120, format="png")
