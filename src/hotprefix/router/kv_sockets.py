"""Sockets towards one publisher of KV events. Owns: `Subscription` (live messages, and how the connection is)
and `ask`, which has batches sent again.

Rules:
1. An address with a `*` is bound, since some publishers connect; every other address is connected to.
2. A connection that is lost, or whose other end is no publisher, ends the subscription: some of these ends
   libzmq never tries again. What came before is read first.
3. Sizes are bounded by libzmq before anything is read here. A peer that is silent is found out by heartbeats.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator
from enum import Enum

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from hotprefix.router.kv_messages import MESSAGE_BYTES, NUMBER_BYTES

QUEUE = 1000
HANDSHAKE_MS = 5000
HEARTBEAT_MS, SILENCE_MS = 5000, 20_000
FIRST_RETRY_MS, LAST_RETRY_MS = 100, 5000
ANSWER_S = 5.0

Frames = list[bytes]
_ANY = re.compile(r"^tcp://(\*|0\.0\.0\.0|\[::\]|::):")
_SEEN = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
)  # fmt: skip


def towards(endpoint: str, host: str) -> str:
    """The address to connect to, of one at which a worker on `host` has bound: a worker that listens on all
    its addresses tells none of them."""
    return _ANY.sub(lambda match: f"tcp://{f'[{host}]' if ':' in host else host}:", endpoint)


class Line(Enum):
    """What happened to the connection: it stands; nothing answers there; what answers is no publisher; it is
    lost."""

    UP = "up"
    UNREACHABLE = "unreachable"
    NO_PUBLISHER = "no publisher"
    DOWN = "down"


class Subscription:
    """A SUB socket, open from the beginning. Raises zmq.ZMQError for an address that cannot be used."""

    def __init__(self, endpoint: str) -> None:
        self.binds = "*" in endpoint
        self._socket = _socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._monitor = self._socket.get_monitor_socket(_SEEN)
        try:
            if self.binds:
                self._socket.bind(endpoint)
            else:
                self._socket.connect(endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    async def receive(self) -> Frames:
        """The next message."""
        return await self._socket.recv_multipart()

    async def waiting(self) -> AsyncIterator[Frames]:
        """The messages that have come already."""
        while await self._socket.poll(0):
            yield await self._socket.recv_multipart()

    async def line(self) -> AsyncIterator[Line]:
        """What happens to the connection; endless."""
        up = False
        while True:
            event = (await recv_monitor_message(self._monitor))["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                up = True
                yield Line.UP
            elif event == zmq.EVENT_CONNECT_RETRIED:
                yield Line.UNREACHABLE
            else:
                yield Line.DOWN if up else Line.NO_PUBLISHER
                up = False


async def ask(endpoint: str, first: int) -> AsyncGenerator[Frames]:
    """A replay's answer, message by message, from batch `first` on; endless, as the end is in the messages.
    Raises TimeoutError if the next one does not come, and zmq.ZMQError for an address that cannot be used."""
    socket = _socket(zmq.DEALER)
    try:
        socket.connect(endpoint)
        await socket.send_multipart([b"", first.to_bytes(NUMBER_BYTES, "big")])
        while True:
            async with asyncio.timeout(ANSWER_S):
                frames = await socket.recv_multipart()
            yield frames
    finally:
        socket.close(linger=0)


def _socket(kind: int) -> zmq.asyncio.Socket:
    socket = zmq.asyncio.Context.instance().socket(kind)
    for option, value in (
        (zmq.LINGER, 0), (zmq.IPV6, 1), (zmq.RCVHWM, QUEUE), (zmq.MAXMSGSIZE, MESSAGE_BYTES),
        (zmq.HANDSHAKE_IVL, HANDSHAKE_MS), (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
        (zmq.HEARTBEAT_TIMEOUT, SILENCE_MS), (zmq.RECONNECT_IVL, FIRST_RETRY_MS),
        (zmq.RECONNECT_IVL_MAX, LAST_RETRY_MS), (zmq.TCP_KEEPALIVE, 1),
    ):  # fmt: skip
        socket.setsockopt(option, value)
    return socket
