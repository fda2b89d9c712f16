"""Names of pages outside this process. Owns: the digest that an external store knows a page by.

Rules (rule 32): a page's key covers format version, namespace, page size, its parent's key and its own
tokens, so it names the whole prefix that ends with the page. Every variable part is typed and preceded by its
length, so two different inputs never give the same bytes. The digest is SHA-256 without a per-process seed:
every process computes the same key.
"""

from __future__ import annotations

import hashlib

from hotprefix.kernel.request import Namespace
from hotprefix.kernel.tokens import TOKEN_BYTES

FORMAT_VERSION = 1
KEY_BYTES = 32


def root_key(namespace: Namespace, page_size: int) -> bytes:
    """The parent key of a namespace's first pages."""
    digest = hashlib.sha256(b"hotprefix-page")
    _frame(digest, FORMAT_VERSION.to_bytes(4, "little"))
    _frame(digest, page_size.to_bytes(8, "little"))
    for part in (namespace.model, namespace.adapter, namespace.adapter_version, namespace.salt):
        _frame(digest, None if part is None else part.encode())
    return digest.digest()


def chain(parent: bytes, key: bytes | bytearray, page_size: int) -> list[bytes]:
    """Keys of the pages in `key` (token bytes, page-aligned) below the page named `parent`."""
    width = page_size * TOKEN_BYTES
    found = []
    for at in range(0, len(key) - len(key) % width, width):
        digest = hashlib.sha256(parent)
        digest.update(key[at : at + width])
        parent = digest.digest()
        found.append(parent)
    return found


def _frame(digest: hashlib._Hash, part: bytes | None) -> None:
    """Add one part: a mark that tells an absent part from an empty one, the length, the bytes."""
    digest.update(b"-" if part is None else b"+" + len(part).to_bytes(8, "little") + part)
