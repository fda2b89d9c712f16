"""What end-to-end tests share. Owns: one `hotprefix serve` on the default model per session, and a browser.

Rules: fp32, and chunks of 128 tokens so that ordinary prompts take several steps; one thread, because two
that wait for each other crawl on a busy machine; started on first use.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.support.browser import browser as browser
from tests.support.serving import Server

CHUNK = 128
FLAGS = [
    "--port", "0", "--dtype", "float32", "--kv-tokens", "16384", "--max-batched-tokens", str(CHUNK),
    "--max-running", "16", "--max-waiting", "64", "--threads", "1", "--cost", "smollm2-135m.cpu-1-thread",
]  # fmt: skip


@pytest.fixture(scope="session")
def live() -> Iterator[Server]:
    """The server process; `live.url` is its address."""
    running = Server([str(Path(sys.executable).parent / "hotprefix"), "serve", *FLAGS])
    try:
        running.until_ready()
        yield running
        running.signal()
        assert running.wait() == 0
    finally:
        running.process.kill()


@pytest.fixture
def client(live: Server) -> openai.OpenAI:
    """The real `openai` client; it may not retry, so that every error shows."""
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=120)
