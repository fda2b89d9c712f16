"""KV events: which pages L1 holds, told to routers. Owns: what is told, and the publisher.

Rules:
1. Pages stored less pages removed are the pages resident, at any moment and on every path. A page that two
   requests computed is told once (rule 60).
2. The wire is vLLM's (kvwire.py). A PUB socket sends the frames (topic, number from 0 as 8 bytes big-endian,
   msgpack batch). A ROUTER socket sends again what is buffered from a number on, as frames (empty, topic,
   number, batch), and then (empty, empty, -1, empty). Both sockets are bound.
3. A block's hash is a 63-bit number from its page key, which covers the namespace and every page before.
4. Token ids are sent only if asked for (docs/records.md).
5. The publisher never makes the engine wait. A batch too many is dropped, and leaves a gap in the numbers
   that a subscriber sees.
"""

from __future__ import annotations

import hmac
import logging
import threading
from collections import deque
from typing import Any

import numpy as np

from hotprefix.errors import ConfigError
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.cache.keys import chain, root_key
from hotprefix.kernel.cache.node import Node
from hotprefix.kernel.request import Namespace
from hotprefix.records.kvwire import Batch, Cleared, Form, PageEvent, Removed, Stored, to_wire

log = logging.getLogger(__name__)

END = (-1).to_bytes(8, "big", signed=True)
BUFFER = 10_000
QUEUE = 10_000
POLL_MS = 50
# Routers of vLLM fleets know a salt by this prefix, and ignore a text without it.
SALT_TAG = "dynamo-cache-salt:"


def block_hash(key: bytes) -> int:
    """63 bits of a page key, so that the hash fits signed and unsigned 64-bit fields alike."""
    return int.from_bytes(key[:8], "big") >> 1


def private_digest(key: bytes, namespace: Namespace) -> str | None:
    """What tells pages of this namespace apart from equal tokens of others: SALT_TAG and an HMAC-SHA256 of
    all that makes the namespace, in hex. None if that is nothing but the model and an adapter's name, which
    subscribers know. key: secret; without it a salt cannot be found out by guessing.
    """
    if namespace.salt is None and namespace.adapter_version is None:
        return None
    return SALT_TAG + hmac.digest(key, b"kv events" + root_key(namespace, 0), "sha256").hex()


class PageEvents:
    """The kernel's `TreeWatch`: turns nodes into events, and remembers the key of each resident page.

    key: the secret of `private_digest`.
    with_tokens: whether token ids are told.
    stored, removed: how many pages were told of so far.
    """

    def __init__(self, page_size: int, key: bytes, *, with_tokens: bool = False) -> None:
        self._page_size, self._key, self._with_tokens = page_size, key, with_tokens
        self._keys: dict[int, bytes] = {}
        self._events: list[PageEvent] = []
        self.stored = 0
        self.removed = 0

    def take(self) -> list[PageEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def resident(self) -> bytes:
        """The hashes of all pages that were told of and have not gone, as `KVSnapshot` has them."""
        keys = np.frombuffer(b"".join(self._keys.values()), dtype=">u8")
        of_keys = keys.reshape(len(self._keys), -1)[:, 0] if self._keys else keys
        return (of_keys >> np.uint64(1)).astype(np.uint64).tobytes()

    def cleared(self) -> None:
        self._events.append(Cleared())

    def added(self, node: Node) -> None:
        parent = node.parent
        if parent is None or node.pages[0] in self._keys:
            return
        if parent.pages and parent.pages[-1] not in self._keys:
            self.added(parent)  # it became real together with this node, and must be told first
        above = self._keys[parent.pages[-1]] if parent.pages else None
        keys = chain(above or root_key(node.namespace, self._page_size), node.key, self._page_size)
        self._keys.update(zip(node.pages, keys, strict=True))
        self.stored += len(keys)
        digest = private_digest(self._key, node.namespace)
        self._events.append(
            Stored(
                hashes=tuple(map(block_hash, keys)),
                parent=None if above is None else block_hash(above),
                tokens=self._tokens(node) if self._with_tokens else (),
                page_size=self._page_size,
                extra=(None if digest is None else (digest,),) * len(keys),
                adapter=node.namespace.adapter,
            )
        )

    def _tokens(self, node: Node) -> tuple[int, ...]:
        """The node's token ids as unsigned numbers. Ids that stand for other content than text may be
        negative, and readers refuse a batch with a negative id."""
        return tuple(tk.view(node.key).view(np.uint32).tolist())

    def removing(self, leaf: Node, count: int) -> None:
        gone = leaf.pages[len(leaf.pages) - count :]
        self.removed += count
        self._events.append(Removed(tuple(block_hash(self._keys.pop(page)) for page in reversed(gone))))


def check_addresses(endpoint: str, replay: str | None) -> None:
    """Bind the addresses of a `KVPublisher` and let go of them again. Raises ConfigError as it does."""
    KVPublisher(endpoint, replay).close()


class KVPublisher:
    """Publishes KV events on a thread of its own. Raises ConfigError if an address cannot be bound, or if
    pyzmq and msgspec are not installed.

    endpoint: the address on which it publishes.
    replay: the address on which it sends batches again; None = it does not.
    form: how an event is written.
    topic: the first frame of every message.
    buffer: how many sent batches are kept for replays.
    queue: how many batches may wait to be sent.
    published, dropped: batches sent, and batches dropped because the queue was full.
    """

    def __init__(
        self, endpoint: str, replay: str | None = None, *, form: Form = Form.MAPS, topic: str = "",
        buffer: int = BUFFER, queue: int = QUEUE,
    ) -> None:  # fmt: skip
        try:
            import msgspec
            import zmq
        except ImportError as error:
            raise ConfigError(
                "KV events need pyzmq and msgspec: pip install 'hotprefix[kvevents]'", param="kv_events"
            ) from error
        self._zmq, self._encode = zmq, msgspec.msgpack.Encoder().encode
        self.topic = topic
        self._form, self._topic, self._limit = form, topic.encode(), queue
        self._queue: deque[tuple[int, float, list[PageEvent]]] = deque()
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=buffer)
        self._next = 0
        self.published = 0
        self.dropped = 0
        self._context = zmq.Context()
        self._pub = self._bind(zmq.PUB, endpoint)
        self._replay = None if replay is None else self._bind(zmq.ROUTER, replay)
        self.endpoint = self._address(self._pub)
        self.replay_endpoint = None if self._replay is None else self._address(self._replay)
        self._bell, self._ring = self._pair()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="hotprefix-kv-events", daemon=True)
        self._thread.start()

    @property
    def last(self) -> int:
        """The number of the last batch; -1 = there was none."""
        return self._next - 1

    def publish(self, ts: float, events: list[PageEvent]) -> None:
        """Queue a batch to be sent. Never waits. ts: Unix time, seconds."""
        number, self._next = self._next, self._next + 1
        if len(self._queue) >= self._limit:
            self.dropped += 1
            return
        self._queue.append((number, ts, events))
        self._ring_bell()

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what is queued and let go of the sockets. Waits for that at most `timeout_s`."""
        self._closing = True
        self._ring_bell()
        self._thread.join(timeout_s)

    # -- sockets ----------------------------------------------------------------------------------

    def _bind(self, kind: int, endpoint: str) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(self._zmq.LINGER, 200)
        try:
            socket.bind(endpoint)
        except self._zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"kv_events: cannot bind {endpoint!r}: {error}; give for example tcp://127.0.0.1:5557",
                param="kv_events",
            ) from error
        return socket

    def _address(self, socket: Any) -> str:
        return str(socket.getsockopt(self._zmq.LAST_ENDPOINT).decode().rstrip("\0"))

    def _pair(self) -> tuple[Any, Any]:
        """A pair of sockets through which `publish` wakes the thread."""
        name = f"inproc://bell-{id(self)}"
        bell, ring = self._context.socket(self._zmq.PAIR), self._context.socket(self._zmq.PAIR)
        bell.bind(name)
        ring.connect(name)
        return bell, ring

    def _ring_bell(self) -> None:
        try:
            self._ring.send(b"", flags=self._zmq.DONTWAIT)
        except self._zmq.ZMQError:  # so many rings are waiting that the thread will wake anyway
            return

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = self._zmq.Poller()
        for socket in (self._bell, self._replay):
            if socket is not None:
                poller.register(socket, self._zmq.POLLIN)
        try:
            while not (self._closing and not self._queue):
                ready = dict(poller.poll(POLL_MS * 20))
                if self._bell in ready:
                    self._bell.recv()
                self._send()
                if self._replay in ready:
                    self._answer()
        except self._zmq.ZMQError as error:
            log.error("KV events end: %s", error)
        finally:
            self._context.destroy(linger=200)

    def _send(self) -> None:
        while self._queue:
            number, ts, events = self._queue.popleft()
            sequence = number.to_bytes(8, "big")
            payload = self._encode(to_wire(Batch(ts, tuple(events)), self._form))
            self._buffer.append((sequence, payload))
            self._pub.send_multipart((self._topic, sequence, payload))
            self.published += 1

    def _answer(self) -> None:
        """Answer one replay request: (the asking socket's identity, empty, the first number wanted)."""
        assert self._replay is not None
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        asker, empty, first = frames
        for sequence, payload in list(self._buffer):
            if sequence >= first:
                self._replay.send_multipart((asker, empty, self._topic, sequence, payload))
        self._replay.send_multipart((asker, empty, b"", END, b""))
