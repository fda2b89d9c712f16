"""Which requests a policy helps. Owns: one replay's requests in buckets, by heat, queue depth, length,
instance.

Rules:
1. The edges are fixed powers (`definitions.EDGES`), equal in every experiment and in `inspect`, so that
   reports can be laid side by side.
2. Every request is in one bucket of each kind; by instance only if it reached one.
3. A bucket without requests has no row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import polars as pl

from hotprefix.definitions import Slo, buckets_of
from hotprefix.lab.paired_sections import Run
from hotprefix.lab.replay_metrics import Rows, last_moment, offered_span, only, request_metrics, request_rows

COLUMNS: Final = {"heat": "heat", "queue depth": "queue_depth", "prompt tokens": "input_tokens"}
FIGURES: Final = (
    "requests", "queue_wait_mean_s", "enqueue_hit_tokens", "net_l1_hit_loss_share", "retained_share",
    "reuse_share", "computed_per_request", "ttft_mean_s", "ttft_p50_s", "ttft_p95_s", "ttft_p99_s",
    "slo_share",
)  # fmt: skip
BUCKET_COLUMNS: Final[dict[str, pl.DataType | type[pl.DataType]]] = {
    "by": pl.String,  # heat | queue depth | prompt tokens | instance
    "order": pl.Int64,  # of the buckets of one kind
    "bucket": pl.String,
    **dict.fromkeys(FIGURES, pl.Float64),
}


def buckets(run: Run, slo: Slo) -> pl.DataFrame:
    """The table of one replay's buckets, with BUCKET_COLUMNS."""
    end = last_moment(run.requests, run.windows) if run.end_s is None else run.end_s
    span = offered_span(run.requests)
    table = []
    for by, order, name, part in _parts(request_rows(run.requests)):
        found = request_metrics(part, slo, span, end)
        table.append({"by": by, "order": order, "bucket": name, **{f: found[f] for f in FIGURES}})
    return pl.DataFrame(table, schema=BUCKET_COLUMNS)


def _parts(rows: Rows) -> Iterator[tuple[str, int, str, Rows]]:
    """(kind, order, name, requests) of every bucket that has requests."""
    for by, column in COLUMNS.items():
        for order, name, low, high in buckets_of(by):
            inside = (rows[column] >= low) & (rows[column] < high)
            if inside.any():
                yield by, order, name, only(rows, inside)
    for instance in np.unique(rows["instance"][~np.isnan(rows["instance"])]):
        yield "instance", int(instance), f"{instance:.0f}", only(rows, rows["instance"] == instance)
