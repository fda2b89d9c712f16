"""Pages in an S3-compatible object store. Owns: `S3Store`.

Rules: each call tries once, within the client's time limit; the worker's breaker decides whether to call
again. Credentials come from the usual AWS variables or the machine's role, never from the URL. The bucket's
life-cycle rule makes room; this store sets no recency.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import SplitResult

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import S3Store as Bucket

from hotprefix.engine.stores.base import NOTHING
from hotprefix.engine.stores.envelope import VERSION
from hotprefix.engine.stores.errors import LinkError, PageError, Reason
from hotprefix.engine.stores.url import Options
from hotprefix.errors import ConfigError

if TYPE_CHECKING:
    from obstore.store import S3Config

T = TypeVar("T")


class S3Store:
    """See the module's rules and `Store`."""

    def __init__(self, shown: str, bucket: Bucket, limit_s: float) -> None:
        self._shown = shown
        self._bucket = bucket
        self._limit_s = limit_s
        self._closed = threading.Event()

    @classmethod
    def from_url(cls, url: SplitResult) -> S3Store:
        """s3://bucket[/prefix][?endpoint=URL&region=NAME&path_style=1&timeout=SECONDS]"""
        options = Options(url, {"endpoint", "region", "path_style", "timeout"})
        if not url.hostname or url.netloc != url.hostname:
            raise ConfigError(
                f"{options.shown!r} is malformed: write s3://bucket/prefix; credentials come from "
                f"AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, bucket names are lower-case",
                param="l3",
            )
        endpoint = options.optional("endpoint")
        limit_s = options.seconds("timeout", 1.0)
        limit = f"{max(1, int(limit_s * 1000))}ms"
        config: S3Config = {
            "region": options.get("region", "us-east-1"),
            "virtual_hosted_style_request": not options.flag("path_style", default=endpoint is not None),
        }
        if endpoint is not None:
            config["endpoint"] = endpoint
        bucket = Bucket(
            url.hostname,
            prefix=f"{url.path.strip('/')}/v{VERSION}".lstrip("/"),
            config=config,
            client_options={"timeout": limit, "connect_timeout": limit, "allow_http": True},
            retry_config={"max_retries": 0},
        )
        return cls(options.shown, bucket, limit_s)

    def describe(self) -> str:
        return self._shown

    def get(self, keys: Sequence[bytes]) -> list[bytes | PageError | None]:
        """Asks for all keys at once; returns the pages before the first failure."""

        async def one(key: bytes) -> bytes | None:
            try:
                reply = await obstore.get_async(self._bucket, key.hex())
                return bytes(await reply.bytes_async())
            except FileNotFoundError:
                return None

        async def every() -> list[bytes | BaseException | None]:
            return await asyncio.gather(*map(one, keys), return_exceptions=True)

        started = time.monotonic()
        pages: list[bytes | PageError | None] = []
        for page in self._call(lambda: asyncio.run(every())):
            if isinstance(page, BaseException):
                if not pages:
                    raise self._link_error(page, started) from page
                break
            pages.append(page)
        return pages

    def put(self, key: bytes, wrapped: bytes) -> None:
        self._call(lambda: obstore.put(self._bucket, key.hex(), wrapped, use_multipart=False))

    def present(self, keys: Sequence[bytes]) -> int:
        def there(key: bytes) -> bool:
            try:
                obstore.head(self._bucket, key.hex())
            except FileNotFoundError:
                return False
            return True

        return self._call(lambda: sum(1 for _ in takewhile(there, keys)))

    def touch(self, keys: Sequence[bytes]) -> None:
        """Does nothing: the bucket decides by an object's age."""

    def remove(self, key: bytes) -> None:
        self._call(lambda: obstore.delete(self._bucket, key.hex()))

    def passed_over(self) -> Mapping[Reason, int]:
        """Empty: the bucket's rule deletes objects, not this store."""
        return NOTHING

    def close(self) -> None:
        """Calls in progress end when their time limit is reached: the client cannot interrupt them."""
        self._closed.set()

    def _call(self, action: Callable[[], T]) -> T:
        if self._closed.is_set():
            raise LinkError(Reason.CLOSED, f"{self._shown} was closed")
        started = time.monotonic()
        try:
            return action()
        except Exception as error:
            raise self._link_error(error, started) from error

    def _link_error(self, error: BaseException, started: float) -> LinkError:
        """The client has one error for all connection problems; the time it took tells a timeout from
        others."""
        if isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
            reason = Reason.DENIED
        elif not isinstance(error, (BaseError, OSError)):
            reason = Reason.FAILED
        elif time.monotonic() - started >= self._limit_s:
            reason = Reason.TIMEOUT
        else:
            reason = Reason.DOWN
        line = str(error).partition("\n")[0]
        return LinkError(reason, f"{self._shown}: {type(error).__name__}: {line}")
