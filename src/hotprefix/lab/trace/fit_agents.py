"""Generator parameters from recorded sessions. Owns: `fit_agents`, for coding-agent session files.

Rules: each quantity is measured as the generator uses it. Its values are described by a lognormal curve with
the mean and deviation of their logarithms, if that curve is within MAX_KS of them (Kolmogorov-Smirnov
distance, scipy), and otherwise by their quantiles. Values that are not above 0 have no logarithm: if more
than the share MAX_ZERO is such, quantiles are taken. The result says for each quantity which form was taken
and how far off the curve is.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from scipy import stats

from hotprefix.lab.trace.cc_sessions import Session, parse_session, row_ends, row_triggers
from hotprefix.lab.trace.lines import files_of, lines
from hotprefix.lab.trace.problems import BadTrace, Report

MAX_KS: Final = 0.05
MAX_ZERO: Final = 0.02
RESUMED: Final = 100_000  # tokens: a session that begins with more is taken to continue an older one
COMPACTED: Final = 0.7  # a reset to less than this share of the context is a compaction
SINGLE: Final = ("prefix", "window", "context")  # only reported: a generator takes no distribution for it
AT: Final = (0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1)


@dataclass(slots=True)
class Measured:
    """Everything that the fit needs of a file. values: by the generator's parameter."""

    sessions: int = 0
    steps: Counter[str] = field(default_factory=Counter)
    values: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    prefixes: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    blocks: set[int] = field(default_factory=set)


def fit_agents(path: Path, report: Report) -> dict[str, Any]:
    """The fit of a file. Raises BadTrace. The result's keys:

    generator: the generator's name.
    params: what `trace generate --params` takes.
    fit: source, counts and, for each quantity, n, form, KS distance of the lognormal curve and quantiles.
    """
    measured = Measured()
    for session in _sessions(path, report):
        _measure(session, measured)
    if not measured.sessions:
        raise BadTrace(f"{path}: holds no session", param="trace")
    if len(measured.blocks) > 1:
        raise BadTrace(f"{path}: block sizes differ: {sorted(measured.blocks)}", param="trace")
    counted = _counted(measured)
    fitted = {name: _fit(values) for name, values in sorted(measured.values.items()) if values}
    shapes = {name: shape for name, (shape, _) in fitted.items() if name not in SINGLE}
    return {
        "generator": "agents",
        "params": {**counted, **shapes},
        "fit": {
            "source": path.name,
            "sessions": measured.sessions,
            "steps": dict(measured.steps),
            "quantities": {name: quality for name, (_, quality) in fitted.items()},
        },
    }


def _sessions(path: Path, report: Report) -> Iterator[Session]:
    for file in files_of(path):
        for number, raw in lines(file):
            if number == 1 and b'"hotprefix_trace"' in raw:
                raise BadTrace(
                    f"{file}: a trace of ours, which no longer tells what a fit needs; give the coding-agent "
                    "session file that it was made from",
                    param="trace",
                )
            try:
                session = parse_session(raw)
                if not session.rows or any(not -1 <= row.parent < i for i, row in enumerate(session.rows)):
                    raise ValueError("rows: empty, or a parent is not an earlier row")
            except (ValueError, RecursionError) as error:
                report.bad(file, number, error)
                continue
            yield session


def _measure(session: Session, found: Measured) -> None:
    """Add one session's measurements to `found`.

    A step that keeps less than half of its parent's complete blocks counts as a reset. A step after an answer
    whose end was not recorded gives no delay, neither after a tool nor after a user: all such steps are
    labelled user text, but half of them follow within seconds, as steps after tools do.
    """
    rows, size, values = session.rows, session.block_size, found.values
    ends, triggers = row_ends(rows), row_triggers(rows)
    prefix = session.tool_tokens + session.system_tokens
    found.sessions += 1
    found.blocks.add(size)
    found.prefixes[(session.model(rows[0]), session.tool_tokens, session.system_tokens)] += 1
    per_agent = Counter(row.agent for row in rows)
    values["prefix"].append(prefix)
    resumed = "resumed_" if rows[0].tokens_in > RESUMED else ""
    values[f"{resumed}steps"].append(per_agent.pop(0, 0))
    first_of = {True: f"{resumed}{'context' if resumed else 'first_context'}", False: "sub_first_context"}
    values["sub_steps"] += per_agent.values()
    begun: set[int] = set()
    for i, row in enumerate(rows):
        values["output"].append(row.tokens_out)
        values["context"].append(row.tokens_in)
        first = row.agent not in begun
        begun.add(row.agent)
        if first:
            found.steps["sub_agent" if row.agent else "first"] += 1
            values[first_of[row.agent == 0]].append(row.tokens_in)
        if first or row.parent < 0:
            continue
        before, trigger = rows[row.parent], triggers[i]
        if row.keep < before.tokens_in // size / 2:
            _reset(before.tokens_in, row.tokens_in, found)
            continue
        if trigger is None or rows[trigger].api is None:
            found.steps["after_unrecorded"] += 1
            continue
        found.steps[row.kind] += 1
        values[f"fresh_after_{row.kind}"].append(max(1, row.tokens_in - row.keep * size))
        values[f"delay_after_{row.kind}"].append(max(0.0, row.t - ends[trigger]))


def _reset(before: int, after: int, found: Measured) -> None:
    if after < COMPACTED * before:
        found.steps["compaction"] += 1
        found.values["window"].append(before)
        found.values["compacted"].append(after)
    else:
        found.steps["reset"] += 1
        found.values["reset_length"].append(after / before)


def _counted(found: Measured) -> dict[str, Any]:
    """The parameters that are counts, shares or single lengths. Shares are of all steps but each agent's
    first."""
    steps = found.steps
    later = steps.total() - steps["first"] - steps["sub_agent"]
    counted: dict[str, Any] = {
        "sessions": found.sessions,
        "block_size": found.blocks.pop(),
        "prefixes": len(found.prefixes),
        "prefix": max(1, round(float(np.median(found.values["prefix"])))),
        "user_share": steps["user"] / max(1, later),
        "reset_share": steps["reset"] / max(1, later),
        "sub_agents": steps["sub_agent"] / max(1, later + steps["first"]),
        "resumed_share": len(found.values["resumed_context"]) / found.sessions,
    }
    if found.values["resumed_context"]:
        counted["resumed_window"] = int(max(found.values["context"]))
    if found.values["window"]:
        counted["window"] = round(float(np.median(found.values["window"])))
    if steps["sub_agent"]:
        counted["sub_prefix"] = max(1, round(float(min(found.values["sub_first_context"]))) - 1)
    return counted


def _fit(values: list[float]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The distribution in the form that a generator takes, and how well it fits."""
    data = np.asarray(values, dtype=np.float64)
    positive = data[data > 0]
    quantiles = np.quantile(data, AT).tolist()
    quality: dict[str, Any] = {"n": len(data), "form": "quantiles", "zero": float((data <= 0).mean())}
    shape: dict[str, Any] = {"at": list(AT), "values": [float(f"{value:.6g}") for value in quantiles]}
    if len(positive) > 1:
        logs = np.log(positive)
        mean, deviation = float(logs.mean()), float(logs.std())
        ks = float(stats.kstest(logs, "norm", args=(mean, deviation)).statistic) if deviation else 0.0
        quality |= {"ks": ks, "median": float(np.exp(mean)), "sigma": deviation}
        if ks <= MAX_KS and quality["zero"] <= MAX_ZERO:
            quality["form"] = "lognormal"
            shape = {"median": float(f"{np.exp(mean):.6g}"), "sigma": float(f"{deviation:.6g}")}
    named = zip(("p10", "p50", "p90", "p99"), np.quantile(data, (0.1, 0.5, 0.9, 0.99)).tolist(), strict=True)
    return shape, quality | dict(named)
