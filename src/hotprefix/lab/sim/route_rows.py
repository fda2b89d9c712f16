"""The tables of a fleet's decisions. Owns: `RouteRows`, one row for each decision, and `LoadRows`, the loads
by window.

Rules: what was predicted is written when it is decided. What came of it is read off the request's row when
the request has ended, for the last decision on it; of a decision whose instance died nothing is known.
"""

from __future__ import annotations

import polars as pl

from hotprefix.fleet.records import Decision, Load
from hotprefix.lab.sim.replay_recorder import Row
from hotprefix.lab.sim.rows import LOAD_COLUMNS, ROUTE_COLUMNS
from hotprefix.lab.sim.table_rows import TableRows

_COMPONENTS = ("prefill", "decode", "pages", "restore", "hand_off")
_TIERS = ("cached_l1", "cached_l2", "cached_l3")


class RouteRows:
    """The route table, request by request in the order in which they ended."""

    def __init__(self) -> None:
        self._open: dict[str, list[Row]] = {}
        self._rows = TableRows(ROUTE_COLUMNS)

    def decided(self, decision: Decision, request: Row, attempt: int, since: float) -> None:
        """Write a decision's row, and what the request's row says of it. since: when it arrived, or lost its
        instance."""
        found, parts = decision.found, decision.parts
        row: Row = dict.fromkeys(ROUTE_COLUMNS)
        row.update(
            id=decision.request, attempt=attempt, at_s=decision.at, held_s=decision.at - since,
            instance=int(decision.worker), rule=decision.rule, prompt_tokens=decision.prompt,
            available_tokens=decision.available, found_l1=found.l1, found_l2=found.l2, found_l3=found.l3,
            found_flight=found.flight, found_peer=found.peer, queue_s=parts.queue, restore_s=parts.restore,
            pull_s=parts.pull, compute_s=parts.compute, hand_off_s=parts.hand_off,
            decode_wait_s=parts.decode_wait, first_s=parts.first, delay_s=parts.delay,
            behind_s=parts.behind, displacement_s=parts.displacement, load=decision.load.largest,
            runners_up=len(decision.runners_up),
            runner_up_first_s=min((other.parts.first for other in decision.runners_up), default=None),
            age_s=decision.age_s, unknown=" ".join(decision.unknown) or None, copying=decision.copying,
            copied_tokens=decision.copied,
        )  # fmt: skip
        request.update(
            available_tokens=decision.available,
            captured_tokens=found.total,
            copied_tokens=decision.copied,
            predicted_first_s=parts.first,
        )
        self._open.setdefault(decision.request, []).append(row)

    def ended(self, request: Row) -> None:
        """Nothing more will come of the decisions on a request. request: its row."""
        begun, first = request["prefill_start_s"], request["first_token_s"]
        for row in self._open.pop(request["id"], ()):
            if row["attempt"] > request["failovers"] and begun is not None:
                row["actual_queue_s"] = begun - row["at_s"]
                if first is not None and first >= begun:
                    row["actual_compute_s"], row["actual_first_s"] = first - begun, first - row["at_s"]
                    row["delivered_tokens"] = sum(request[tier] or 0 for tier in _TIERS)
            self._rows.add(row)

    def frame(self) -> pl.DataFrame:
        """The table, in the order of the decisions."""
        return self._rows.frame().sort("at_s", "id", "attempt")


class LoadRows:
    """The load table."""

    def __init__(self, window_s: float) -> None:
        self._seconds = window_s
        self._rows: dict[tuple[int, int], Row] = {}

    def seen(self, instance: int, load: Load, now: float) -> None:
        """Count an instance's load as the fleet sees it now."""
        window = int(now / self._seconds)
        row = self._rows.get((window, instance))
        if row is None:
            row = dict.fromkeys(LOAD_COLUMNS, 0.0)
            row.update(instance=instance, start_s=window * self._seconds, seen=0)
            self._rows[window, instance] = row
        row["seen"] += 1
        for name, value in zip(_COMPONENTS, load, strict=True):
            row[name] = None if value is None or row[name] is None else row[name] + value
        row["load"] += load.largest
        row["load_max"] = max(row["load_max"], load.largest)

    def close(self) -> list[Row]:
        """The rows, with means in the place of sums."""
        for row in self._rows.values():
            for name in (*_COMPONENTS, "load"):
                row[name] = None if row[name] is None else row[name] / row["seen"]
        return list(self._rows.values())
