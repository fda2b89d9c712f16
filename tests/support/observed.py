"""A driver that is watched as the engine's loop is. Owns: `WatchedDriver` and random programs for it.

Rules: a program is a list of plain operations made from a seed, so the same one can be run with and
without observation and the plans compared.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass
from typing import Any

from hotprefix.engine.messages import EngineInfo
from hotprefix.engine.observe import Observer
from hotprefix.errors import ContextLengthExceeded, QueueFull
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.config import (
    Capabilities,
    Flight,
    Order,
    Prefetch,
    Publication,
    Refresh,
    TierConfig,
    Write,
)
from hotprefix.kernel.plan import StepPlan
from hotprefix.kernel.request import Namespace, Request
from tests.support.drive import Driver
from tests.support.fake import VOCAB

BASES = [[(11 * i + 17 * b) % VOCAB for i in range(60)] for b in range(4)]


class WatchedDriver(Driver):
    """Tells `observer`, or nobody, what the engine's loop tells it."""

    def __init__(self, observer: Observer | None = None, **config: object) -> None:
        sink = observer.event if observer is not None and observer.wants_events else None
        super().__init__(sink=sink, **config)  # type: ignore[arg-type]
        self.observer = observer
        if observer is not None:
            page = self.config.page_size
            info = EngineInfo("fake", 200, VOCAB, page, self.config.total_pages * page)
            observer.opened(self.kernel, info, "fake weights", self.now)

    def submit(
        self, name: str, prompt: list[int], max_tokens: int = 4, salt: str | None = None, **more: object
    ) -> None:
        if self.observer is not None:
            request = Request(name, tk.encode(prompt), max_tokens, Namespace(salt=salt), **more)  # type: ignore[arg-type]
            self.observer.submitted(request, self.now, self.now)
        super().submit(name, prompt, max_tokens, salt, **more)

    def execute(self, plan: StepPlan) -> None:
        super().execute(plan)
        if self.observer is not None:
            self.observer.changed(self.now)

    def flush(self) -> None:
        self.kernel.flush(self.now)
        if self.observer is not None:
            self.observer.changed(self.now)

    def _note(self, progress: object) -> None:
        super()._note(progress)
        if progress is not None and progress.finish is not None and self.observer is not None:  # type: ignore[attr-defined]
            self.observer.ended(progress, self.now)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Program:
    """settings: the driver's. ops: (name, argument) pairs. same_step: see Capabilities."""

    settings: dict[str, object]
    ops: list[tuple[str, object]]
    same_step: bool = True

    @property
    def reads_planned(self) -> bool:
        """Whether requests may read pages that others compute in the same step."""
        return self.same_step and self.settings["publication"] is Publication.SCHEDULE


def program(seed: int, length: int = 60, tiers: bool = True) -> Program:
    """A random program of submissions, aborts, failures, flushes and steps, over small pools."""
    r = random.Random(seed)
    page = r.choice([1, 4])
    settings: dict[str, object] = {
        "total_pages": r.choice([90, 130, 200]) // page,
        "page_size": page,
        "publication": r.choice(list(Publication)),
        "flight": r.choice(list(Flight)),
        "order": r.choice(list(Order)),
        "refresh": r.choice(list(Refresh)),
        "max_running": r.choice([1, 3, 8]),
        "max_batched_tokens": r.choice([9, 32, 200]),
    }
    if tiers and r.random() < 0.6:
        settings["tiers"] = TierConfig(
            pages=r.choice([60, 200]) // page, storage=r.random() < 0.6, write=r.choice(list(Write)),
            min_restore_pages=1, min_fetch_pages=1, compute_s_per_token=1.0, restore_s_per_page=0.001,
            fetch_s_per_page=0.001,
        )  # fmt: skip
    ops: list[tuple[str, object]] = []
    for number in range(length):
        what = r.choices(["submit", "steps", "abort", "fail", "flush"], [10, 9, 1, 1, 0.6])[0]
        if what == "submit":
            base = r.choice(BASES)[: r.randint(1, 60)]
            tail = [r.randrange(VOCAB) for _ in range(r.randint(0, 4))]
            ops.append(("submit", (f"r{number}", base + tail, r.randint(1, 9), r.choice([None, None, "a"]))))
        elif what == "abort":
            ops.append(("abort", r.randrange(1000)))
        else:
            ops.append((what, r.randint(1, 4)))
    return Program(settings, ops)


def busy_program(seed: int, length: int = 70) -> Program:
    """A random program in which requests wait long, lose what they matched on arrival, find it again by every
    way there is, share fetches and copies, are put back, and leave holds behind."""
    r = random.Random(seed)
    page = r.choice([1, 4])
    settings: dict[str, object] = {
        "total_pages": r.choice([70, 100, 130]) // page,
        "page_size": page,
        "publication": r.choice([Publication.SCHEDULE, *Publication]),
        "flight": r.choice([Flight.COALESCED, *Flight]),
        "order": r.choice([Order.FCFS, *Order]),
        "refresh": r.choice([Refresh.OFF, *Refresh]),
        "preemption": r.random() < 0.3,
        "max_running": r.choice([1, 2, 3, 6]),
        "max_batched_tokens": r.choice([9, 16, 32, 200]),
        "max_waiting": r.choice([0, 0, 0, 9]),
        "output_reserve": r.choice([0.0, 0.0, 0.25]),
        "session_pages": r.choice([0, 20]) // page,
        "prefix_cache": r.random() < 0.95,
    }
    if r.random() < 0.75:
        settings["tiers"] = TierConfig(
            pages=r.choice([60, 120, 400]) // page, storage=r.random() < 0.75,
            write=r.choice([Write.THROUGH, *Write]), prefetch=r.choice([Prefetch.WAIT_COMPLETE, *Prefetch]),
            prefetch_timeout_s=r.choice([3.0, 300.0]), min_restore_pages=1, min_fetch_pages=1,
            fetch_window=r.choice([1, 8]), compute_s_per_token=1.0, restore_s_per_page=0.001,
            fetch_s_per_page=0.001,
        )  # fmt: skip
    bases = [[r.randrange(VOCAB) for _ in range(48)] for _ in range(3)]
    ops: list[tuple[str, object]] = []
    for number in range(length):
        what = r.choices(
            ["submit", "steps", "abort", "fail", "flush", "delay", "between"], [12, 9, 1.5, 1, 0.5, 1, 2]
        )[0]
        if what in ("submit", "between"):
            prompt = r.choice(bases)[: r.choice([17, 30, 40, 48])] + [r.randrange(VOCAB)] * r.randint(0, 2)
            more = {"priority": r.randint(0, 2), "session": r.choice([None, "s", "t"]), "hold_s": 6.0}
            ops.append(
                (what, (f"r{number}", prompt, r.choice([1, 3, 14]), r.choice([None] * 5 + ["a"]), more))
            )
        else:
            ops.append((what, r.randrange(1000) if what == "abort" else r.randint(1, 5)))
    return Program(settings, ops, same_step=r.random() < 0.7)


def _submit(d: WatchedDriver, argument: Any) -> None:
    name, prompt, outputs, salt, *more = argument
    with contextlib.suppress(ContextLengthExceeded, QueueFull):
        d.submit(name, prompt, outputs, salt, **(more[0] if more else {}))


def _abort(d: WatchedDriver, number: int) -> None:
    live = [name for name in d.prompts if name not in d.finish]
    if live:
        d.abort(live[number % len(live)])


def run(made: Program, observer: Observer | None = None) -> WatchedDriver:
    """Run a program to its end."""
    d = WatchedDriver(observer, capabilities=Capabilities(made.same_step), **made.settings)
    for what, argument in made.ops:
        if what == "submit":
            _submit(d, argument)
        elif what == "between":  # a request comes, and another may go, while a step is in flight
            plan = d.plan()
            _submit(d, argument)
            _abort(d, len(d.prompts))
            if not plan.empty:
                d.execute(plan)
        elif what == "delay":
            d.storage_delay = argument  # type: ignore[assignment]
        elif what == "abort":
            _abort(d, argument)  # type: ignore[arg-type]
        elif what == "fail":
            d.executor.fail_next = 1
            d.step()
        elif what == "flush":
            d.flush()
        else:
            for _ in range(argument):  # type: ignore[call-overload]
                d.step()
    d.run()
    d.assert_cold_equal()
    return d
