"""Draws the README's second picture from two replays' results.

usage: python bench/replay_picture.py REFRESH/summary.json EVICTION/summary.json OUT.png

Left: share of what was cached on arrival and lost before admission, by live sessions and refresh arm
(`hotprefix replay refresh-by-queue-depth`). Right: reused tokens as a share of the clairvoyant bound, by
capacity and eviction key (`hotprefix replay eviction-x-capacity`). Only draws what the files say.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

COLOURS = {
    "off": "#8b8f98", "window": "#2f5fd0", "queue_informed": "#1f8a70", "lru": "#8b8f98", "slru": "#2f5fd0",
    "lfu": "#c2702a", "sieve": "#1f8a70", "reuse": "#8a3fa0",
}  # fmt: skip
HIDDEN = {"priority"}  # equal to lru where all requests have one priority


def bars(axes: Axes, groups: list[str], series: dict[str, list[float]], title: str, along: str) -> None:
    """One group of bars per circumstance, one bar per arm."""
    width = 0.84 / len(series)
    for i, (name, values) in enumerate(series.items()):
        places = [at + (i - (len(series) - 1) / 2) * width for at in range(len(groups))]
        drawn = axes.bar(places, values, width, label=name, color=COLOURS.get(name))
        axes.bar_label(drawn, fmt="%.1f" if max(values) < 10 else "%.0f", fontsize=7, padding=1)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_xlabel(along)
    axes.set_title(title, fontsize=9, pad=22)
    axes.legend(frameon=False, fontsize=8, ncols=len(series), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    axes.spines[["top", "right"]].set_visible(False)


def loss(axes: Axes, summary: dict[str, Any]) -> None:
    conditions = summary["conditions"].values()
    series = {
        arm: [100 * c["arms"][arm]["metrics"]["net_l1_hit_loss_share"] for c in conditions]
        for arm in summary["arms"]
    }
    groups = [c["settings"]["load.concurrency"] for c in conditions]
    title = "lost between arrival and admission, % of the hit on arrival"
    bars(axes, groups, series, title, "live sessions")


def shares(axes: Axes, summary: dict[str, Any]) -> None:
    bounds = summary["bounds"]
    names = {arm: arm.split("=")[-1] for arm in bounds[0]["reused_tokens"]}
    series = {
        name: [100 * b["reused_tokens"][arm] / b["clairvoyant_tokens"] for b in bounds]
        for arm, name in names.items()
        if name not in HIDDEN
    }
    groups = [f"{b['capacity_tokens'] / 1e6:.2g}" for b in bounds]
    bars(axes, groups, series, "reused, % of what a clairvoyant cache could", "L1, million tokens")


def main() -> None:
    refresh, eviction, out = sys.argv[1:]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.4, 3.4), layout="constrained")
    loss(left, json.loads(Path(refresh).read_text(encoding="utf-8")))
    shares(right, json.loads(Path(eviction).read_text(encoding="utf-8")))
    figure.savefig(out, dpi=150)


if __name__ == "__main__":
    main()
