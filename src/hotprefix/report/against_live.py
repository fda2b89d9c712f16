"""How far the simulator can be believed, for people. Owns: the section, the page, the table and the JSON of a
`Believed`.

Rules: the answer comes first. Decisions and times never share a table. An error has a sign: plus if the
simulator takes the engine for slower than it is. A missing figure is a dash.
"""

from __future__ import annotations

import dataclasses
import json

from markupsafe import Markup
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from hotprefix.lab.live.against import STANDARD_ERRORS, Believed
from hotprefix.lab.live.compare import Level
from hotprefix.lab.table_math import PERCENTILE_METHOD
from hotprefix.report.figure_text import DASH, seconds
from hotprefix.report.html_page import render_page

TITLE = "The simulator against the engine"
DECISIONS = (
    "load", "requests", "reuse otherwise", "same in live order", "reused", "of prompt tokens",
    "steps live / simulated", "same steps",
)  # fmt: skip
TIMES = (
    "load", "time", "live p50", "error", "calibration explains", "live p95", "error", "calibration explains",
    "typical error",
)  # fmt: skip


def to_json(found: Believed) -> str:
    """Every figure, and `reuse_equal`."""
    return json.dumps(dataclasses.asdict(found) | {"reuse_equal": found.reuse_equal}, indent=1)


def section(found: Believed) -> Markup:
    """A fragment for a page made from `page.html`: headings of level 2 and below."""
    return Markup(render_page("against_live_section.html", **_parts(found)))


def render(found: Believed) -> str:
    """A page of its own."""
    return render_page("against_live.html", title=TITLE, section=section(found))


def print_tables(found: Believed, console: Console) -> None:
    """The same for a terminal."""
    console.print(answer(found), soft_wrap=True, markup=False)
    for heads, rows in ((DECISIONS, _decisions(found)), (TIMES, _times(found))):
        table = Table(*heads, box=SIMPLE_HEAD)
        before = ""
        for load, *row in rows:
            table.add_row("" if load == before else load, *row)
            before = load
        console.print(table)
    for line in reasons(found):
        console.print(line, soft_wrap=True, markup=False)


def answer(found: Believed) -> str:
    """What the two runs show, in two sentences."""
    given = [level for level in found.levels if level.load is None]
    equal = sum(level.requests - len(level.differ) for level in given)
    asked = sum(level.requests for level in given)
    same = sum(level.order_parity is True for level in found.levels)
    ordered = sum(level.order_parity is not None for level in found.levels)
    worst = max(
        (time for level in found.levels for time in level.times if time.relative_p50 is not None),
        key=lambda time: abs(time.relative_p50 or 0.0),
        default=None,
    )
    far = (
        ""
        if worst is None
        else f" Medians are off by {_percent(worst.relative_p50)} at worst ({worst.name})."
    )
    return (
        f"Where the order of requests is given, {equal} of {asked} reuse the same tokens; with the live "
        f"order the simulator makes the same decisions at {same} of {ordered} loads.{far}"
    )


def reasons(found: Believed) -> list[str]:
    """Why decisions differ, load by load."""
    return [_reason(level) for level in found.levels if level.diverged is not None]


def _reason(level: Level) -> str:
    live, simulated = level.diverged or (DASH, DASH)
    cause = (
        "only because arrivals fell on other steps: with the live order every event is the same"
        if level.order_parity
        else "and not because of the order alone: this is a fault of ours"
    )
    return (
        f"{level.name}: decisions differ, {cause}. {len(level.differ)} of {level.requests} requests reuse "
        f"other tokens. First difference: live {live}; simulated {simulated}."
    )


def _decisions(found: Believed) -> list[tuple[str, ...]]:
    return [
        (
            level.name, str(level.requests), str(len(level.differ)), _yes(level.order_parity),
            f"{level.reused:,}", f"{level.input_tokens:,}", f"{level.steps_live} / {level.steps_simulated}",
            "all" if level.events_equal else f"first {level.steps_equal}",
        )
        for level in found.levels
    ]  # fmt: skip


def _times(found: Believed) -> list[tuple[str, ...]]:
    return [
        (
            level.name, time.name, seconds(time.live_p50_s), _error(time.error_p50_s, time.relative_p50),
            _between(time.between_p50_s), seconds(time.live_p95_s),
            _error(time.error_p95_s, time.relative_p95), _between(time.between_p95_s),
            seconds(time.typical_s),
        )
        for level in found.levels for time in level.times
    ]  # fmt: skip


def _error(amount: float, relative: float | None) -> str:
    text = seconds(abs(amount))
    sign = "" if text == seconds(0.0) else "−" if amount < 0 else "+"
    share = "" if relative is None else f" ({_percent(relative)})"
    return f"{sign}{text}{share}"


def _between(errors: tuple[float, float] | None) -> str:
    """The range of the error, if every step took as much less and as much more time as the calibration may be
    off."""
    return DASH if errors is None else f"{_error(errors[0], None)} to {_error(errors[1], None)}"


def _percent(share: float | None) -> str:
    if share is None:
        return DASH
    whole = round(share * 100)
    return f"{whole:+d} %".replace("-", "−") if whole else "0 %"


def _yes(value: bool | None) -> str:
    return DASH if value is None else "yes" if value else "no"


def _parts(found: Believed) -> dict[str, object]:
    saturation = f"{found.saturation_rps:.2f} requests/s, measured with all at once"
    conditions = [
        ("trace", f"{found.trace}, {found.requests} requests, {found.left_out} too long for this engine"),
        ("lengths", f"each block of the trace became {found.block} tokens"),
        ("engine", f"{found.model}; {found.hardware}; L1 of {found.kv_tokens:,} tokens in pages of "
                   f"{found.page_size}; no lower tiers"),
        ("cost model", found.cost),
        ("calibration explains", f"errors with every step {STANDARD_ERRORS:.0f} standard errors of the "
                                 "calibration shorter, and longer; a machine that is slower at another time "
                                 "comes on top"),
        ("clock", _CLOCKS[found.clock]),
        ("saturation", saturation),
        ("percentiles", f"method {PERCENTILE_METHOD!r}; with few requests a p95 is close to the largest"),
        ("version", found.version),
    ]  # fmt: skip
    return {
        "title": TITLE,
        "answer": answer(found),
        "reasons": reasons(found),
        "tables": (
            {"title": "Decisions", "heads": DECISIONS, "rows": _decisions(found)},
            {"title": "Times, error = simulated − live", "heads": TIMES, "rows": _times(found)},
        ),
        "conditions": conditions,
    }


_CLOCKS = {
    "wall": "wall clock",
    "cpu": "the engine thread's processor time; waits are skipped (other programs used the machine)",
}
