"""Why an external store did not give a page. Owns: `Reason` and the stores' branch of the error tree.

Rules: every failure has exactly one reason of the fixed list below; counters, events and metrics use
these words. `PageError` means trouble with one page: the store answered, but gave no usable page or did not
take this one. `LinkError` means that the store itself is in trouble; only it counts for the circuit breaker.
Neither ever ends a request: a page that does not arrive is computed again (rule 37).
"""

from __future__ import annotations

from enum import StrEnum

from hotprefix.errors import HotprefixError


class Reason(StrEnum):
    """Why pages stopped coming, or why a page was not stored."""

    # the store answered: the page is not usable
    MISSING = "missing"
    TRUNCATED = "truncated"
    CORRUPTED = "corrupted"
    FOREIGN_VERSION = "foreign_version"
    WRONG_KEY = "wrong_key"
    WRONG_LENGTH = "wrong_length"
    UNREADABLE = "unreadable"
    # the store is in trouble
    TIMEOUT = "timeout"
    DOWN = "down"
    FULL = "full"
    DENIED = "denied"
    FAILED = "failed"
    # this side did not ask, or did not want the answer any more
    BUSY = "busy"
    CIRCUIT_OPEN = "circuit_open"
    STOPPED = "stopped"
    CANCELLED = "cancelled"
    CLOSED = "closed"


class StoreError(HotprefixError):
    """A store operation failed; `reason` is for machines, the message for people."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class PageError(StoreError):
    """The store answered, but one page is not what was asked for, or was not accepted."""


class LinkError(StoreError):
    """The store could not do what was asked: absent, slow, full, forbidden or faulty."""
