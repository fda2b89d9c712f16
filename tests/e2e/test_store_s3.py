"""The s3 store against a local emulator, and against servers that refuse, hang or are not there."""

from __future__ import annotations

import logging
import socket
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from moto.server import ThreadedMotoServer

from hotprefix.engine.stores.base import Store
from hotprefix.engine.stores.envelope import pack
from hotprefix.engine.stores.errors import LinkError, Reason
from hotprefix.engine.stores.open_store import open_store
from hotprefix.engine.stores.worker import StoreWorker
from hotprefix.engine.stores.worker_config import WorkerConfig
from tests.support.stores import PAGE, PATIENCE_S, key, keys, payload


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """An emulator with the bucket `pages`."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    with urllib.request.urlopen(urllib.request.Request(f"{url}/pages", method="PUT"), timeout=20):
        yield url
    server.stop()


class Answers:
    """A server that sends one fixed answer to everything; None = it never answers."""

    def __init__(self, answer: bytes | None) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(connection)
            if self._answer is not None:
                connection.recv(65536)
                connection.sendall(self._answer)
                connection.close()

    def close(self) -> None:
        for each in (self._listener, *self._open):
            each.close()


def put(store: Store, *numbers: int) -> None:
    for number in numbers:
        store.put(key(number), pack(key(number), payload(number)))


def reason_of(action: Any, *arguments: Any) -> Reason:
    with pytest.raises(LinkError) as caught:
        action(*arguments)
    return caught.value.reason


def test_pages_come_back(endpoint: str) -> None:
    store = open_store(f"s3://pages/some/where?endpoint={endpoint}&timeout=20")
    put(store, 1, 2, 4)
    wrapped = [pack(key(n), payload(n)) for n in (1, 2, 4)]
    assert store.get(keys(1, 2, 3, 4)) == [wrapped[0], wrapped[1], None, wrapped[2]]
    assert store.present(keys(1, 2, 3, 4)) == 2
    store.touch(keys(1))
    store.remove(key(2))
    store.remove(key(2))
    assert store.get(keys(1, 2)) == [wrapped[0], None]
    store.close()
    assert reason_of(store.get, keys(1)) is Reason.CLOSED


def test_prefixes_are_apart(endpoint: str) -> None:
    put(open_store(f"s3://pages/one?endpoint={endpoint}&timeout=20"), 1)
    assert open_store(f"s3://pages/two?endpoint={endpoint}&timeout=20").get(keys(1)) == [None]


def test_a_bucket_that_is_not_there(endpoint: str) -> None:
    store = open_store(f"s3://nobody?endpoint={endpoint}&timeout=20")
    assert store.get(keys(1)) == [None]
    assert reason_of(put, store, 1) is Reason.DOWN


def test_a_server_that_is_not_there_is_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store = open_store(f"s3://pages?endpoint=http://127.0.0.1:{port}&timeout=20")
    assert reason_of(store.get, keys(1, 2)) is Reason.DOWN
    assert reason_of(store.present, keys(1)) is Reason.DOWN


def test_a_server_that_refuses() -> None:
    server = Answers(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    store = open_store(f"s3://pages?endpoint={server.url}&timeout=20")
    assert reason_of(store.get, keys(1)) is Reason.DENIED
    assert reason_of(put, store, 1) is Reason.DENIED
    server.close()


def test_a_server_that_never_answers_times_out() -> None:
    server = Answers(None)
    assert (
        reason_of(open_store(f"s3://pages?endpoint={server.url}&timeout=0.1").get, keys(1)) is Reason.TIMEOUT
    )
    server.close()


def test_through_the_worker(endpoint: str) -> None:
    ready = threading.Event()
    store = open_store(f"s3://pages/worker?endpoint={endpoint}&timeout=20")
    worker = StoreWorker(store, WorkerConfig(page_bytes=PAGE, timeout_s=PATIENCE_S), on_ready=ready.set)
    for number in range(5):
        assert worker.submit_put(key(number), payload(number))
    assert worker.drain(PATIENCE_S)
    worker.submit_fetch("a", keys(*range(6)))
    assert ready.wait(PATIENCE_S)
    [fetched] = worker.poll()
    assert fetched.payloads == tuple(payload(n) for n in range(5))
    assert fetched.reason is Reason.MISSING
    assert worker.close() == 0


def test_a_page_of_another_version_is_replaced(endpoint: str) -> None:
    ready = threading.Event()
    store = open_store(f"s3://pages/damaged?endpoint={endpoint}&timeout=20")
    worker = StoreWorker(store, WorkerConfig(page_bytes=PAGE, timeout_s=PATIENCE_S), on_ready=ready.set)
    put(store, 1)
    wrapped = bytearray(pack(key(1), payload(1)))
    wrapped[4] ^= 0x10
    store.put(key(1), bytes(wrapped))
    found = []
    for turn in range(2):
        worker.submit_put(key(1), payload(1))
        assert worker.drain(PATIENCE_S)
        ready.clear()
        worker.submit_fetch(turn, keys(1))
        assert ready.wait(PATIENCE_S)
        found += [fetched.payloads for fetched in worker.poll()]
        assert worker.drain(PATIENCE_S)
    assert found == [(), (payload(1),)]
    assert worker.close() == 0
