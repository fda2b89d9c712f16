"""Draws goodput against offered load by routing policy, from a replay's result.

usage: python bench/routing_picture.py OUT/summary.json PICTURE.png

Draws the first condition that sets `trace.params.rate`, and those that differ from it in nothing but the rate
and the number of requests (`hotprefix replay routing-load`). On the dashed line every request is served
within the objectives. Arms that coincide are nested dots. Only draws what the file says.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

RATE = "trace.params.rate"
REQUESTS = "trace.params.requests"  # may grow with the rate, so that all conditions last as long
COLOURS = {
    "round_robin": "#8b8f98", "least_load": "#c2702a", "affinity": "#8a3fa0", "bounded": "#2f5fd0",
    "predicted": "#1f8a70",
}  # fmt: skip


def curves(summary: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Arm -> (offered, goodput) in requests/s by offered load, of the arms in COLOURS that were run. An arm
    without goodput in a condition has no point there."""
    found: dict[str, list[tuple[float, float]]] = {}
    swept = [one for one in summary["conditions"].values() if RATE in one["settings"]]
    for condition in swept:
        if rest(condition) == rest(swept[0]):
            for arm, told in condition["arms"].items():
                goodput = told["metrics"]["goodput_rps"]
                if arm in COLOURS and goodput is not None:
                    found.setdefault(arm, []).append((float(condition["settings"][RATE]), goodput))
    return {arm: sorted(found[arm]) for arm in COLOURS if arm in found}


def rest(condition: dict[str, Any]) -> dict[str, str]:
    """The settings of a condition that must not differ along a curve."""
    return {key: text for key, text in condition["settings"].items() if key not in (RATE, REQUESTS)}


def objectives(summary: dict[str, Any]) -> str:
    """What goodput counts by, in words."""
    names = {"ttft_s": "TTFT", "tpot_s": "time per output token", "completion_s": "completion"}
    parts = [f"{name} ≤ {summary['slo'][key]:g} s" for key, name in names.items() if summary["slo"][key]]
    return " and ".join(parts) or "no objective"


def main() -> None:
    source, out = sys.argv[1:]
    summary = json.loads(Path(source).read_text(encoding="utf-8"))
    drawn = curves(summary)
    if not drawn:
        sys.exit(f"{source}: no condition sets {RATE}, or no arm is one of {', '.join(COLOURS)}")
    figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    rates = sorted({rate for points in drawn.values() for rate, _ in points})
    axes.plot(rates, rates, color="#b9bdc4", linestyle="--", linewidth=1, label="all in time")
    for at, (arm, points) in enumerate(drawn.items()):
        width = 1 + 0.7 * (len(drawn) - 1 - at)
        axes.plot(*zip(*points, strict=True), color=COLOURS[arm], linewidth=width, marker="o",
                  markersize=3 + 2 * width, label=arm)  # fmt: skip
    axes.set_xticks(rates)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("offered, requests/s")
    axes.set_title(f"goodput, requests/s ({objectives(summary)})", fontsize=9, pad=24)
    axes.legend(frameon=False, fontsize=8, ncols=6, loc="lower center", bbox_to_anchor=(0.5, 1.0),
                handlelength=1.2, columnspacing=1.0)  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=150)


if __name__ == "__main__":
    main()
