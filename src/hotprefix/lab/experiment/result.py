"""What an experiment found. Owns: `ExperimentResult`, which the runner fills and every report reads.

Rules: plain data, nothing is computed here; settings are already written for readers (text); what was not
measured is absent or null, never 0. A run that failed or was skipped is named, never left out silently.
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
    """One setting of the surroundings. capacity_tokens: L1 of one instance, the sweep's x axis."""

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
    """Where the requests came from. source: file, generator with parameters, or published address.
    ideal_reuse_share: of blocks, endless cache."""

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
    """The honesty label's cost model. errors: cross-validated absolute percentage errors (0.08 = 8 %) by
    regime, (median, p95); empty where the source gives none."""

    name: str
    source: str
    hardware: str
    model: str
    errors: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Share:
    """The clairvoyant bound of a condition: the most tokens any policy could have reused at its capacity,
    and what each arm reused in the same unit (seed means). Shares follow from these."""

    condition: str
    capacity_tokens: int
    total_tokens: int
    clairvoyant_tokens: float
    reused_tokens: Mapping[str, float]


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
    """metrics: METRIC_ROWS, long. comparisons: (condition, arm) -> metric -> arm against the baseline.
    buckets: rows of lab.buckets with condition and arm before them. windows: WINDOW_COLUMNS with condition
    and arm before them, of the first seed only. fixed: what was equal in all arms. seeds: those that the
    figures are of. looks: when the claims were looked at; a verdict's own seeds may be fewer than all."""

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
    problems: tuple[Problem, ...] = ()
