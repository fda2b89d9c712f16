"""Ids of tool calls. Owns: the form that every known template takes, new ids in it, and the mapping of other
ids to it.

Rules: an id is nine letters and digits, because Mistral's templates refuse any other. A foreign id always
maps to the same one, so a call and its result stay together.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import string

LENGTH = 9
_LETTERS = string.ascii_letters + string.digits
_FORM = re.compile(rf"[a-zA-Z0-9]{{{LENGTH}}}")


def new_id() -> str:
    """A random id (one of 10^16)."""
    return _spelled(secrets.randbits(64))


def short_id(given: str) -> str:
    """The id itself if it has the form, otherwise one that is derived from it."""
    if _FORM.fullmatch(given):
        return given
    return _spelled(int.from_bytes(hashlib.sha256(given.encode("utf-8", "surrogatepass")).digest()))


def _spelled(number: int) -> str:
    letters = []
    for _ in range(LENGTH):
        number, at = divmod(number, len(_LETTERS))
        letters.append(_LETTERS[at])
    return "".join(letters)
