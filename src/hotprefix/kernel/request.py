"""What a driver submits. Owns: `Request` and `Namespace`, both frozen.

Rules:
1. A namespace is typed and framed by its fields, never a concatenation, so two different namespaces can never
   be equal (rule 13).
2. Token ids travel as bytes (`kernel.tokens`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from hotprefix.kernel import tokens as tk

RequestId = str

_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True)
class Namespace:
    """What must be equal for KV to be reusable.

    model: the fingerprint of weights, config, dtype and rope.
    adapter, adapter_version: the adapter that is applied; None = none.
    salt: isolates tenants (`cache_salt`, API key); None = shared by all that give none.
    """

    model: str = ""
    adapter: str | None = None
    adapter_version: str | None = None
    salt: str | None = None


@dataclass(frozen=True, slots=True)
class ContentSpan:
    """Positions [start, stop) hold placeholder tokens for content (an image, audio, an embedding). The
    content is identified by `digest` (32 bytes, SHA-256), not by its placeholder ids, which are equal for all
    content (rule 14)."""

    start: int
    stop: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Request:
    """One generation to run.

    id: unique among the requests that have not ended.
    tokens: the prompt, int32 bytes, at least one token.
    max_tokens: outputs at most, >= 0. With 0 the prompt is computed and the token sampled at its end dropped.
    namespace: see `Namespace`.
    priority: smaller is more important.
    reuse_limit: leading prompt tokens that may come from the cache. 0 if the logits of every prompt position
    are wanted; None = as many as match.
    share_limit: leading tokens that may be published; None = all.
    cache_key: what identifies the prompt in the cache, as many bytes as `tokens`. None = the tokens do;
    otherwise `content_key` made it.
    session: the session to which the request belongs; None = none.
    hold_s: how long, in seconds, the session keeps this request's pages protected after it ended well, at
    most; the session's next request ends that earlier.
    next_use_s: predicted seconds from this request's end to the session's next one, >= 0 (eviction `reuse`);
    None = no next one is expected.
    """

    id: RequestId
    tokens: bytes
    max_tokens: int
    namespace: Namespace = field(default_factory=Namespace)
    priority: int = 0
    reuse_limit: int | None = None
    share_limit: int | None = None
    cache_key: bytes | None = None
    session: str | None = None
    hold_s: float = 0.0
    next_use_s: float | None = None

    @property
    def prompt_len(self) -> int:
        return tk.count(self.tokens)

    @property
    def key(self) -> bytes:
        return self.tokens if self.cache_key is None else self.cache_key


def content_key(tokens: bytes, spans: Iterable[ContentSpan], page_size: int) -> tuple[bytes, int | None]:
    """Cache key and share limit of a prompt with non-text content.

    In each page in which a span starts, the first 8 ids of the key are replaced by a SHA-256 of those ids and
    of every span that starts in the page (where it starts, where it stops, its digest). A page is matched as
    a whole, and only after all pages before it. So no part of a span can match unless all 32 bytes do,
    wherever in the page it starts; text in the pages before is still shared. If the page has no room for a
    digest (page_size < 8, or fewer than 8 ids of the prompt in it), nothing is shared from that page on: a
    miss, never a wrong hit. Returns (key, share_limit). Raises ValueError if a digest does not have 32 bytes,
    or if a span lies outside the prompt.
    """
    key = bytearray(tokens)
    limit: int | None = None
    starting: dict[int, list[ContentSpan]] = {}
    for span in spans:
        if len(span.digest) != _DIGEST_BYTES:
            raise ValueError(f"content digest has {len(span.digest)} bytes: give SHA-256 (32 bytes)")
        if not 0 <= span.start < span.stop <= tk.count(tokens):
            raise ValueError(f"content at [{span.start}, {span.stop}) of {tk.count(tokens)} tokens")
        starting.setdefault(span.start // page_size, []).append(span)
    for page, here in starting.items():
        start = page * page_size
        at = start * tk.TOKEN_BYTES
        head = tokens[at : at + _DIGEST_BYTES]
        if len(head) < _DIGEST_BYTES or page_size * tk.TOKEN_BYTES < _DIGEST_BYTES:
            limit = start if limit is None else min(limit, start)
            continue
        digest = hashlib.sha256(head)
        for span in sorted(here, key=lambda s: s.start):
            digest.update(span.start.to_bytes(8, "little") + span.stop.to_bytes(8, "little") + span.digest)
        key[at : at + _DIGEST_BYTES] = digest.digest()
    return bytes(key), limit
