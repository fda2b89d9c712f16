"""Drives a kernel with the fake executor. Owns: `Driver`, the tests' loop."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hotprefix.kernel import tokens as tk
from hotprefix.kernel.config import Capabilities, KernelConfig
from hotprefix.kernel.events import Event, Sink
from hotprefix.kernel.kernel import Kernel
from hotprefix.kernel.plan import Finish, StepPlan
from hotprefix.kernel.request import Namespace, Request
from tests.support import fake_groups
from tests.support.fake import FakeExecutor, cold_run


class Driver:
    """One kernel, one fake executor, a clock that counts steps; `check` after every step."""

    def __init__(
        self,
        total_pages: int = 64,
        page_size: int = 4,
        capabilities: Capabilities | None = None,
        sink: Sink | None = None,
        kinds: Collection[type[Event]] | None = None,
        full: bool = True,
        **config: object,
    ) -> None:
        """full: with layer groups, whether the model also has full attention."""
        config.setdefault("max_running", 16)
        config.setdefault("max_batched_tokens", 512)
        self.config = replace(
            KernelConfig(total_pages=total_pages, page_size=page_size),
            **config,  # type: ignore[arg-type]
        )
        self.kernel = Kernel(self.config, capabilities, sink, kinds)
        tiers = self.config.tiers
        self.executor = FakeExecutor(
            total_pages, page_size, self.config.max_running, tiers.pages if tiers else 0
        )
        self.full = full
        if self.config.groups:
            self.executor = fake_groups.GroupExecutor(
                total_pages, page_size, self.config.max_running, self.config.groups, full
            )
        self.fetches: dict[int, tuple[bytes, ...]] = {}
        self.storage_delay = 0
        self.storage_seconds = 1.0
        self._due: list[tuple[float, int]] = []
        self.now = 0.0
        self.prompts: dict[str, list[int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.finish: dict[str, Finish] = {}
        self.cached: dict[str, int] = {}
        self.sources: dict[str, tuple[int, int, int]] = {}
        self.computed: dict[str, int] = {}
        self.plans: list[StepPlan] = []
        self.stop_at: frozenset[int] = frozenset()

    def submit(
        self, name: str, prompt: list[int], max_tokens: int = 4, salt: str | None = None, **more: object
    ) -> None:
        request = Request(name, tk.encode(prompt), max_tokens, Namespace(salt=salt), **more)  # type: ignore[arg-type]
        self.kernel.submit(request, self.now)
        self.prompts[name] = prompt
        self.outputs[name] = []

    def abort(self, name: str) -> None:
        self._note(self.kernel.abort(name, self.now))

    def plan(self) -> StepPlan:
        self.deliver()
        plan = self.kernel.plan(self.now)
        self.plans.append(plan)
        for fetch in plan.fetches:
            self.fetches[fetch.id] = fetch.keys
            self._due.append((self.now + self.storage_delay, fetch.id))
        for cancelled in plan.cancels:
            self.fetches.pop(cancelled, None)
        return plan

    def deliver(self) -> None:
        """Report every fetch whose time has come: the leading keys that the store has."""
        for due, fetch in [d for d in self._due if d[0] <= self.now]:
            self._due.remove((due, fetch))
            if fetch in self.fetches:
                self.land(fetch)

    def land(self, fetch: int, most: int | None = None) -> None:
        keys = self.fetches.pop(fetch)[:most]
        payloads = []
        for key in keys:
            if key not in self.executor.stored:
                break
            payloads.append(self.executor.stored[key])
        where = self.kernel.transfer_done(fetch, len(payloads), self.storage_seconds, self.now)
        for index, page in where.items():
            self.executor.land(page, payloads[index])

    def execute(self, plan: StepPlan) -> None:
        outcome = self.executor.run(plan, self.stop_at)
        self.now += 1.0
        for progress in self.kernel.commit(plan, outcome, self.now):
            self._note(progress)
        self.kernel.check()

    def step(self) -> StepPlan:
        plan = self.plan()
        if not plan.empty:
            self.execute(plan)
        else:
            self.now += 1.0
        return plan

    def run(self, limit: int = 10_000) -> Driver:
        for _ in range(limit):
            if not self.kernel.has_work:
                break
            self.step()
        assert not self.kernel.has_work, f"still running after {limit} steps"
        self.kernel.check()
        return self

    def _note(self, progress: object) -> None:
        if progress is None:
            return
        name = progress.request
        assert name not in self.finish, f"{name} heard of after its end"
        if progress.token is not None:
            self.outputs[name].append(progress.token)
        self.cached[name] = progress.cached
        self.computed[name] = progress.computed
        self.sources[name] = (
            progress.cached - progress.host - progress.storage,
            progress.host,
            progress.storage,
        )
        if progress.finish is not None:
            self.finish[name] = progress.finish

    def cold(self, prompt: list[int], outputs: int) -> list[int]:
        """The uncached output of this driver's model."""
        groups = self.config.groups
        return (
            fake_groups.cold_run(prompt, outputs, groups, self.full) if groups else cold_run(prompt, outputs)
        )

    def assert_cold_equal(self) -> None:
        """Every output, complete or cut short, is the uncached run's."""
        for name, output in self.outputs.items():
            assert output == self.cold(self.prompts[name], len(output)), name
