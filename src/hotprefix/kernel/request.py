"""What a driver submits. Owns: `Request` and `Namespace`, both frozen.

Rules: a namespace is typed and framed by its fields, never a concatenation, so two different ones
can never be equal (terms.md; handed case 14). Token ids travel as bytes (`kernel.tokens`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from hotprefix.kernel import tokens as tk

RequestId = str


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
    identity is `digest` (32 bytes, SHA-256), not its equal placeholder ids (handed case 7)."""

    start: int
    stop: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Request:
    """One generation to run.

    tokens: prompt, int32 bytes, at least one. max_tokens: outputs at most, >= 1. priority: smaller
    runs first. reuse_limit: leading prompt tokens that may come from the cache (0 where every
    prompt position's logits are wanted); None = as many as match. cache_key: what identifies the
    prompt in the cache; equal to `tokens` unless `content_key` made another. share_limit: leading
    tokens that may be published (None = all). session: when the request ends well, its pages stay
    protected for at most `hold_s` seconds or until the session's next request takes them over.
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

    @property
    def prompt_len(self) -> int:
        return tk.count(self.tokens)

    @property
    def key(self) -> bytes:
        return self.tokens if self.cache_key is None else self.cache_key


def content_key(tokens: bytes, spans: Iterable[ContentSpan]) -> tuple[bytes, int | None]:
    """Cache key and share limit of a prompt with non-text content.

    The 32-byte digest replaces the first 8 placeholder ids of its span, so that equal placeholders
    with different content never match and the text before them still does. A span shorter than 8
    tokens cannot hold its digest: from its start on nothing is shared (a miss, never a wrong hit).
    Returns (key, share_limit). Raises ValueError where a digest is not 32 bytes.
    """
    key = bytearray(tokens)
    limit: int | None = None
    for span in spans:
        if len(span.digest) != hashlib.sha256().digest_size:
            raise ValueError(f"content digest has {len(span.digest)} bytes: give SHA-256 (32 bytes)")
        words = len(span.digest) // tk.TOKEN_BYTES
        if span.stop - span.start < words:
            limit = span.start if limit is None else min(limit, span.start)
            continue
        at = span.start * tk.TOKEN_BYTES
        key[at : at + len(span.digest)] = span.digest
    return bytes(key), limit
