"""A small experiment for tests, and a sweep that does its runs in the test's own process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hotprefix.lab.experiment.sweep import Task, Watch, attempt


def tiny(more: str, top: str = "") -> str:
    """An experiment file: six prompts in turn, LRU against LFU. more: what follows. top: further keys of the
    experiment itself."""
    return f"""
name = "tiny"
question = "Does eviction matter?"
baseline = "lru"
seeds = 2
cost = "llama-3.1-8b.1xh100.fp8"
{top}
[trace]
generate = "churn"
[trace.params]
prompts = 6
rounds = 3
prompt = 256
output = 4
every_s = 31.0
[capacity]
size = 1024
[factors]
"kernel.eviction" = ["lru", "lfu"]
{more}"""


def in_this_process(
    tasks: Sequence[Task], out: Path, *, jobs: int, watch: Watch, meanwhile: Callable[[], None] | None = None
) -> None:
    """The sweep without its processes (test_experiment_sweep has those)."""
    if meanwhile is not None:
        meanwhile()
    for task in tasks:
        watch.ended(task, attempt(task, out, lambda done: None))
