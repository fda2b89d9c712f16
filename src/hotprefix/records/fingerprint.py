"""Keyed fingerprints. Owns: how a prompt's page prefixes are named in records without telling the prompt.

Rules:
1. A fingerprint is an HMAC-SHA256 with a key that the log does not contain. Without the key a guess at the
   text cannot be tested.
2. Fingerprints are chained: a page's covers the namespace and every page before it. So two requests share a
   page's fingerprint exactly if they share the cacheable prefix that ends with it.
3. It is written as 16 hex digits.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from pathlib import Path

from hotprefix.errors import ConfigError
from hotprefix.kernel.cache.keys import root_key
from hotprefix.kernel.request import Namespace
from hotprefix.kernel.tokens import TOKEN_BYTES

HEX = 16
MIN_KEY_BYTES = 16


class Fingerprinter:
    """Makes fingerprints with one key. page_size: tokens per page."""

    def __init__(self, key: bytes, page_size: int) -> None:
        self._key = key
        self._page_size = page_size

    @property
    def key_name(self) -> str:
        """A name that tells keys apart and tells nothing about them."""
        return hmac.digest(self._key, b"key name", "sha256").hex()[:HEX]

    def of_text(self, text: str) -> str:
        """A name for something that is not a prompt."""
        return hashlib.sha256(text.encode()).hexdigest()[:HEX]

    def of_name(self, namespace: Namespace, name: str) -> str:
        """A keyed name for something within a namespace that is not a prompt."""
        return hmac.digest(self._key, self.root(namespace) + b"name " + name.encode(), "sha256").hex()[:HEX]

    def pages(self, namespace: Namespace, tokens: bytes, most: int | None = None) -> list[str]:
        """Fingerprints of the complete pages of `tokens` (int32 bytes), at most the first `most`."""
        return self.chain(self.root(namespace), tokens, most)[0]

    def root(self, namespace: Namespace) -> bytes:
        """The state with which a namespace's chains begin."""
        return hmac.digest(self._key, root_key(namespace, self._page_size), "sha256")

    def chain(self, last: bytes, tokens: bytes, most: int | None = None) -> tuple[list[str], bytes]:
        """(fingerprints, state): as `pages`, for tokens that follow a prefix. last: the chain's state at the
        prefix's end. The state that is returned stands for these tokens too."""
        width = self._page_size * TOKEN_BYTES
        count = len(tokens) // width
        found = []
        for at in range(0, (count if most is None else min(count, most)) * width, width):
            last = hmac.digest(self._key, last + tokens[at : at + width], "sha256")
            found.append(last.hex()[:HEX])
        return found, last


def load_key(path: Path | None) -> bytes:
    """The key in a file, or a new random one if `path` is None. Raises ConfigError if the file cannot be read
    or holds too few bytes."""
    if path is None:
        return secrets.token_bytes(32)
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"events key file {path}: {error}", param="events_key_file") from error
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(
            f"events key file {path} holds {len(key)} bytes: give at least {MIN_KEY_BYTES} random ones",
            param="events_key_file",
        )
    return key
