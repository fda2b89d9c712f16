"""A real router reads our KV events: the indexer of NVIDIA Dynamo, which hashes token ids, with its replay.

Needs an interpreter that has it, named by HOTPREFIX_DYNAMO_PYTHON (docs/records.md says how to make one).
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from hotprefix.kernel.request import Namespace
from hotprefix.records.kvevents import SALT_TAG, KVPublisher, PageEvents, private_digest
from hotprefix.records.kvwire import Form
from tests.support.drive import Driver

PYTHON = os.environ.get("HOTPREFIX_DYNAMO_PYTHON")
KEY = b"0123456789abcdef"
PAGE = 4
pytestmark = pytest.mark.skipif(PYTHON is None, reason="HOTPREFIX_DYNAMO_PYTHON is not set")


@pytest.fixture
def indexer(tmp_path: Path) -> Iterator[httpx.Client]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (tmp_path / "indexer.log").open("wb") as log:
        process = subprocess.Popen(
            [str(PYTHON), "-m", "dynamo.indexer", "--port", str(port)], stdout=log, stderr=log
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            until(lambda: answers(client), "the indexer answers")
            yield client
    finally:
        process.terminate()
        process.wait(timeout=30)


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def until(holds: Callable[[], bool], what: str) -> None:
    for _ in range(300):
        if holds():
            return
        time.sleep(0.1)
    raise AssertionError(f"not within 30 s: {what}")


@pytest.mark.parametrize("form", list(Form))
def test_an_indexer_counts_our_pages_and_no_tenants(indexer: httpx.Client, form: Form) -> None:
    d = Driver(page_size=PAGE, total_pages=16)
    pages = PageEvents(PAGE, KEY, with_tokens=True)
    publisher = KVPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", form=form)
    pages.cleared()
    d.kernel.watch_pages(pages)

    def run(name: str, prompt: list[int], salt: str | None = None) -> None:
        d.submit(name, prompt, 1, salt)
        d.run()
        publisher.publish(time.time(), pages.take())

    def matched(prompt: list[int], salt: str | None = None) -> int:
        asked = {"token_ids": prompt, "model_name": "m"} | ({"cache_salt": salt} if salt else {})
        scores = indexer.post("/query", json=asked).raise_for_status().json()["scores"]
        return int(scores.get("7", {}).get("0", 0))

    try:
        shared, secret = list(range(17)), list(range(50, 67))
        run("before", shared)  # before it listens: it has to ask for this again
        worker = {
            "instance_id": 7, "endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint,
            "model_name": "m", "block_size": PAGE,
        }  # fmt: skip
        indexer.post("/register", json=worker).raise_for_status()

        def joined() -> bool:
            """A message after it has joined shows it the gap."""
            publisher.publish(time.time(), [])
            return matched(shared) == 16

        until(joined, "what was missed is replayed")
        run("tenant", secret, "tenant")
        digest = private_digest(KEY, Namespace(salt="tenant"))
        assert digest is not None
        until(lambda: matched(secret, digest.removeprefix(SALT_TAG)) == 16, "the tenant's pages are found")
        assert matched(secret) == 0
        assert matched(secret, "tenant") == 0
        run("evicts", list(range(30, 30 + 13 * PAGE)))
        until(lambda: matched(shared) == 0, "evicted pages are gone")
    finally:
        publisher.close()
