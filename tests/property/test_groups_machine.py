"""Layer groups under any interleaving, against the uncached run: windows, recurrent states and full attention
in every mix, with so few frames that windows lose theirs all the time (rules 7 and 42)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from hotprefix.kernel.config import (
    Capabilities,
    Eviction,
    Flight,
    LayerGroup,
    Order,
    Publication,
    Refresh,
)
from tests.property.test_kernel_machine import KernelMachine
from tests.property.test_repeats import ARRIVALS, CONFIGS, Program
from tests.support.drive import Driver

# For each group, whether it has a window; a group without one keeps a recurrent state.
MIXES = {
    "window": (True,), "two windows": (True, True), "recurrent": (False,),
    "window and recurrent": (True, False),
}  # fmt: skip


class GroupsMachine(KernelMachine):
    """The kernel machine over models with layer groups."""

    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        tokens=st.integers(80, 400),
        same_step=st.booleans(),
        full=st.booleans(),
        mix=st.sampled_from(sorted(MIXES)),
        windows=st.lists(st.sampled_from([1, 2, 5, 16, 17, 40, 500]), min_size=2, max_size=2),
        spare=st.lists(st.sampled_from([0, 0, 1, 3, 10, 100]), min_size=2, max_size=2),
        config=st.fixed_dictionaries(
            {
                "publication": st.sampled_from(Publication),
                "flight": st.sampled_from(Flight),
                "order": st.sampled_from(Order),
                "eviction": st.sampled_from(Eviction),
                "refresh": st.sampled_from(Refresh),
                "max_running": st.integers(1, 8),
                "max_batched_tokens": st.sampled_from([8, 9, 13, 32, 57, 200]),
                "preemption": st.booleans(),
                "prefix_cache": st.sampled_from([True, True, True, False]),
                "output_reserve": st.sampled_from([0.0, 0.25, 1.0]),
                "session_pages": st.sampled_from([0, 8, 1000]),
            }
        ),
    )
    def build(
        self, page_size: int, tokens: int, same_step: bool, full: bool, mix: str, windows: list[int],
        spare: list[int], config: dict[str, Any],
    ) -> None:  # fmt: skip
        groups = tuple(
            self._group(window if has else None, page_size, more)
            for has, window, more in zip(MIXES[mix], windows, spare, strict=False)
        )
        able = Capabilities(same_step)
        pages = max(tokens // page_size, 1)
        self._watch(Driver(pages, page_size, able, full=full, groups=groups, **config), able)

    @staticmethod
    def _group(window: int | None, page_size: int, more: int) -> LayerGroup:
        """A group with as few frames as its window allows, and `more` beyond them."""
        if window is None:
            return LayerGroup(1 + more)
        return LayerGroup(-(-(window - 1) // page_size) + 1 + more, window)

    @invariant()
    def frames_conserved(self) -> None:
        if not hasattr(self, "d"):
            return
        for count in self.d.kernel.status().groups:
            assert count.free + count.held + count.idle == count.total

    def teardown(self) -> None:
        if not hasattr(self, "d"):
            return
        super().teardown()
        for count in self.d.kernel.status().groups:
            assert (count.free, count.held, count.idle) == (count.total, 0, 0)


TestGroups = GroupsMachine.TestCase
TestGroups.settings = settings(max_examples=200, stateful_step_count=30)


@pytest.mark.slow
class TestGroupsDeep(GroupsMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(max_examples=4000, stateful_step_count=60, derandomize=False)


@given(
    config=CONFIGS, arrivals=ARRIVALS, page=st.sampled_from([2, 8, 16]), tokens=st.integers(40, 300),
    full=st.booleans(), window=st.sampled_from([1, 6, 16, 40]), more=st.sampled_from([0, 2, 9]),
)  # fmt: skip
def test_repeating_decodes_decides_nothing_about_windows(
    config: dict[str, Any], arrivals: list[tuple[Any, ...]], page: int, tokens: int, full: bool, window: int,
    more: int,
) -> None:  # fmt: skip
    """No window lets go of a page between two plans, so the frames are the same in the end, in the same
    order."""
    config = {**config, "full": full, "groups": (GroupsMachine._group(window, page, more),)}
    once, many = (
        Program(config, max(1, tokens // page), page, True, many).run(arrivals) for many in (False, True)
    )
    assert once.told() == many.told()
    assert once.d.outputs == many.d.outputs
    assert once.d.kernel.status() == many.d.kernel.status()
    many.d.assert_cold_equal()
