"""The project's one error tree. Owns: every exception that hotprefix raises on purpose.

Rules: the message of each error says the offending value and the fix. `HotprefixError` catches them all. An
error that the caller can correct derives from `InputError`: the CLI answers it with exit status 2, the server
with a 4xx. Every other error is a fault of hotprefix or of the machine (exit status 1, 5xx).
"""

from __future__ import annotations


def shortened(value: object, most: int = 60) -> str:
    """An offending value as a message shows it, in at most `most` characters."""
    text = repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."


class HotprefixError(Exception):
    """Root of the tree."""


class InputError(HotprefixError):
    """Something that the caller gave is wrong. param: the name of the field, if there is one."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ConfigError(InputError):
    """A configuration value is out of range, or two values contradict each other."""


class RequestRejected(InputError):
    """This request can never run (for example because it needs more pages than exist)."""


class ContextLengthExceeded(RequestRejected):
    """Prompt plus outputs do not fit the model's context or the whole page pool."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class ModelLoadError(InputError):
    """The model's files are absent or damaged, or of a family that is not supported."""


class QueueFull(HotprefixError):
    """The waiting queue is at its limit; try again after `retry_after` seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineDead(HotprefixError):
    """The engine process or thread has ended, so no answer will come from it."""


class ProtocolError(HotprefixError):
    """A driver broke the kernel's call order (an unknown id, the commit of a plan that was never made). This
    is a bug of hotprefix."""
