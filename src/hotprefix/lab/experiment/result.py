"""What an experiment found. Owns: `ExperimentResult`, which the runner fills and every report reads.

Rules:
1. This is plain data; nothing is computed here. Settings are already written for readers, as text.
2. What was not measured is absent or null, never 0.
3. A run that failed or was skipped is named, never left out in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import polars as pl

from hotprefix.definitions import Slo
from hotprefix.lab.experiment.looks import Look
from hotprefix.lab.stats import Comparison
from hotprefix.lab.verdict import Verdict

METRIC_ROWS: Final[dict[str, pl.DataType | type[pl.DataType]]] = {
    "condition": pl.String,
    "arm": pl.String,
    "seed": pl.Int64,
    "metric": pl.String,  # a name of lab.metric_names
    "value": pl.Float64,  # null: not measured, or a percentile beyond the replay's end
}


@dataclass(frozen=True, slots=True)
class Condition:
    """The circumstances that hold for all arms of a comparison. capacity_tokens: L1 of one instance, the x
    axis of plots over capacity."""

    name: str
    about: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    capacity_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Arm:
    """One policy that is compared."""

    name: str
    about: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where the requests came from.

    source: a file, a generator with its parameters, or a published address.
    ideal_reuse_share: the share of its blocks that an endless cache would reuse.
    """

    name: str
    source: str
    requests: int
    input_tokens: int
    output_tokens: int
    block_size: int
    ideal_reuse_share: float | None
    loop: str  # open | closed
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CostLabel:
    """The cost model in the honesty label. errors: for each regime the cross-validated absolute percentage
    errors (median, p95), 0.08 = 8 %; empty if the source gives none."""

    name: str
    source: str
    hardware: str
    model: str
    errors: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Share:
    """The clairvoyant bound of a condition; means over seeds, from which shares follow.

    total_tokens: the prompt tokens.
    clairvoyant_tokens: the most of these that any policy could have reused at the condition's capacity.
    reused_tokens: what each arm reused, in the same unit.
    """

    condition: str
    capacity_tokens: int
    total_tokens: int
    clairvoyant_tokens: float
    reused_tokens: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class FleetRun:
    """The tables of one run with several instances. They stay on disk: a reader takes from them what it
    shows.

    routes: columns ROUTE_COLUMNS.
    loads: columns LOAD_COLUMNS.
    """

    seed: int
    routes: pl.LazyFrame
    loads: pl.LazyFrame


@dataclass(frozen=True, slots=True)
class Problem:
    """A run without a result. kind: failed | skipped."""

    condition: str
    arm: str
    seed: int
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class ExperimentResult:
    """Everything that a report reads.

    command: the command line that repeats the experiment.
    fixed: the settings that were equal in all runs.
    baseline: the arm with which the others are compared in tables.
    seeds: the seeds of the figures.
    metrics: columns METRIC_ROWS, one row a figure.
    comparisons: (condition, arm) -> metric -> arm against the baseline.
    verdicts: one for each hypothesis. Its seeds may be fewer than all.
    buckets: rows of lab.buckets, with condition and arm before them.
    windows: WINDOW_COLUMNS of the first seed, with condition and arm before them.
    looks: when the claims were looked at.
    bounds: the clairvoyant bound of each condition that has one.
    fleets: (condition, arm) -> its finished runs, where these have several instances.
    problems: the runs without a result.
    """

    name: str
    question: str
    spec_hash: str
    version: str
    command: str
    fixed: Mapping[str, str]
    conditions: tuple[Condition, ...]
    arms: tuple[Arm, ...]
    baseline: str
    seeds: tuple[int, ...]
    slo: Slo
    metrics: pl.DataFrame
    comparisons: Mapping[tuple[str, str], Mapping[str, Comparison]]
    verdicts: tuple[Verdict, ...]
    buckets: pl.DataFrame
    windows: pl.DataFrame
    trace: Provenance
    cost: CostLabel
    looks: tuple[Look, ...] = ()
    bounds: tuple[Share, ...] = ()
    fleets: Mapping[tuple[str, str], tuple[FleetRun, ...]] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
