"""The scheduler's own time in a replay: refresh has a price where the cost model gives one."""

from __future__ import annotations

import pytest

from hotprefix.kernel.config import Refresh
from hotprefix.lab.sim.arrivals import Loop
from tests.support.replays import agents, price, replay

TOUCH_S = 1e-5


def spent(refresh: Refresh, touch_s: float | None, **more: object) -> tuple[float, int]:
    """The scheduler's seconds and refresh's touches of one replay, all sessions at once on a small L1."""
    found = replay(
        agents(12, 3), cost=price(refresh_touch_s=touch_s), total_pages=40, max_running=2, refresh=refresh,
        loop=Loop.CLOSED,
        **more,
    ).windows  # fmt: skip
    return found["scheduler_s"].sum(), found["refresh_touches"].sum()


def test_a_touch_costs_what_the_cost_file_says() -> None:
    free, touches = spent(Refresh.WINDOW, 0.0)
    assert touches > 30
    dear, again = spent(Refresh.WINDOW, 1e-12)  # so little that no decision moves
    assert again == touches
    assert dear - free == pytest.approx(1e-12 * touches, rel=0.05)
    assert spent(Refresh.WINDOW, TOUCH_S)[0] > free + TOUCH_S * touches / 2


def test_without_refresh_nothing_is_touched_or_paid() -> None:
    assert spent(Refresh.OFF, TOUCH_S) == spent(Refresh.OFF, 0.0)
    assert spent(Refresh.OFF, None) == spent(Refresh.OFF, 0.0)
    assert spent(Refresh.OFF, TOUCH_S)[1] == 0
