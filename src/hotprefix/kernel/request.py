"""What a driver submits. Owns: `Request` and `Namespace`, both frozen.

Rules: a namespace is typed and framed by its fields, never a concatenation, so two different ones
can never be equal (docs/terms.md; rule 13). Token ids travel as bytes (`kernel.tokens`).
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
    """What must be equal for KV to be reusable. `model` is the fingerprint of weights, config, dtype
    and rope; `salt` isolates tenants (`cache_salt`, API key)."""

    model: str = ""
    adapter: str | None = None
    adapter_version: str | None = None
    salt: str | None = None


@dataclass(frozen=True, slots=True)
class ContentSpan:
    """Positions [start, stop) hold placeholder tokens for content (image, audio, embedding) whose
    identity is `digest` (32 bytes, SHA-256), not its equal placeholder ids (rule 14)."""

    start: int
    stop: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Request:
    """One generation to run.

    tokens: prompt, int32 bytes, at least one. max_tokens: outputs at most, >= 0; with 0 the prompt is
    computed, and what is sampled at its end is nobody's. priority: smaller runs first. reuse_limit:
    leading prompt tokens that may come from the cache (0 where every prompt position's logits are
    wanted); None = as many as match. cache_key: what identifies the prompt in the cache; equal to
    `tokens` unless `content_key` made another. share_limit: leading tokens that may be published (None =
    all). session: when the request ends well, its pages stay protected for at most `hold_s` seconds or
    until the session's next request takes them over. next_use_s: predicted seconds from this request's
    end to the session's next one, >= 0 (eviction `reuse`); None = nobody is expected.
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

    In each page in which a span starts, the first 8 ids of the key give way to a SHA-256 of those ids and
    of every span that starts in the page (where, how long, its digest). A page is matched as a whole
    and after all pages before it, so nothing of a span can match without all 32 bytes, wherever in
    the page it starts; text in the pages before is still shared. Where the page has no room for a digest
    (page_size < 8, or fewer than 8 ids of the prompt in it) nothing is shared from that page on: a
    miss, never a wrong hit. Returns (key, share_limit). Raises ValueError where a digest is not 32 bytes
    or a span lies outside the prompt.
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
