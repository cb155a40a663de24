"""Draws a comparison as a PNG: `python benchmarks/chart.py RESULT.json CHART.png`.

Knows `compare.py`'s last line; needs matplotlib, which has an environment of its own.
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

WIDTH = 0.4  # of a bar; a pair takes 0.8 of its place
COLOURS = ("#2b6cb0", "#a0aec0")


def draw(result: dict[str, Any], target: Path) -> None:
    """Write a chart of pairs of bars: tokens per second on a logarithmic axis."""
    keys, facts = [key for key in result["ours"] if key != "facts"], result["ours"]["facts"]
    figure, axes = plt.subplots(figsize=(max(6.0, len(keys)), 4.5), layout="constrained")
    for number, (side, label) in enumerate((("ours", "Loraplex"), ("theirs", result["peer"]))):
        places = [place + (number - 0.5) * WIDTH for place in range(len(keys))]
        values = [result[side][key] for key in keys]
        bars = axes.bar(places, values, WIDTH, label=label, color=COLOURS[number])
        axes.bar_label(bars, [f"{value:.0f}" for value in values], fontsize=8)
    axes.set_yscale("log")
    axes.set_ylabel("tokens per second")
    axes.set_xticks(range(len(keys)), [key.replace("_", "\n") for key in keys])
    axes.set_title(f"SmolLM2-135M on {facts['cores']} cores of {facts['processor']}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(target, dpi=150)


def main() -> None:
    """The command line."""
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    draw(json.loads(source.read_text()), target)


if __name__ == "__main__":
    main()
