"""vLLM's /metrics. Owns: the few figures of it that a choice needs.

Rules:
1. One process may serve several data-parallel ranks; their figures are summed.
2. vLLM does not tell how many prompt tokens are still to be computed. For waiting requests it is taken to be
   their number times the mean prompt so far; without a prompt so far it is not known.
3. Pages in use are told as a share. Those not in use count as free, whether or not they are cached.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from hotprefix.router.heard import Figures

LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)", re.MULTILINE)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
WANTED = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:request_prompt_tokens_sum", "vllm:request_prompt_tokens_count", "vllm:cache_config_info",
    "process_start_time_seconds",
}  # fmt: skip


class Found(NamedTuple):
    """incarnation: when the process began, in nanoseconds. page_size, total_pages: None if not told."""

    figures: Figures
    incarnation: int | None
    page_size: int | None
    total_pages: int | None


def read_metrics(text: str) -> Found | None:
    """None if these are not vLLM's."""
    values: dict[str, list[float]] = {}
    page_size = total = None
    for name, labels, value in _lines(text):
        values.setdefault(name, []).append(value)
        if name == "vllm:cache_config_info":
            told = dict(LABEL.findall(labels))
            page_size = _whole(told.get("block_size")) or page_size
            total = (total or 0) + _whole(told.get("num_gpu_blocks")) or None
    if "vllm:num_requests_running" not in values:
        return None
    running = int(sum(values["vllm:num_requests_running"]))
    waiting = int(sum(values.get("vllm:num_requests_waiting", ())))
    prompts, tokens = (sum(values.get(f"vllm:request_prompt_tokens_{end}", ())) for end in ("count", "sum"))
    prefill = 0 if not waiting else round(waiting * tokens / prompts) if prompts else None
    used = values.get("vllm:kv_cache_usage_perc")
    pages = None
    if used and total:
        held = round(total * sum(used) / len(used))
        pages = (total - held, 0, held, 0)
    started = values.get("process_start_time_seconds")
    incarnation = int(started[0] * 1e9) if started and started[0] > 0 else None
    return Found(Figures(waiting, prefill, running, pages), incarnation, page_size, total)


def _lines(text: str) -> Iterator[tuple[str, str, float]]:
    for found in LINE.finditer(text):
        name, labels, value = found.groups()
        if name not in WANTED:
            continue
        try:
            number = float(value)
        except ValueError:
            continue
        if 0 <= number < 1e18:  # neither NaN nor infinite
            yield name, labels or "", number


def _whole(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0
