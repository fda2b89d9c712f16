"""The project's one error tree. Owns: every exception hotprefix raises on purpose.

Rules: each error says the offending value and the fix in its message; `HotprefixError` catches them
all. What a caller may correct derives from `InputError` (the CLI answers it with exit status 2, the
server with a 4xx); everything else is ours to fix (exit status 1, 5xx).
"""

from __future__ import annotations


class HotprefixError(Exception):
    """Root of the tree."""


class InputError(HotprefixError):
    """Something the caller gave is wrong; `param` names the field where there is one."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ConfigError(InputError):
    """A configuration value is out of range or two of them contradict each other."""


class RequestRejected(InputError):
    """The kernel or engine cannot ever run this request (for example: it needs more pages than exist)."""


class ContextLengthExceeded(RequestRejected):
    """Prompt plus outputs do not fit the model's context or the whole page pool."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class ModelLoadError(InputError):
    """The model's files are absent, damaged or of a family that is not supported."""


class QueueFull(HotprefixError):
    """The waiting queue is at its limit; try again after `retry_after` seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineDead(HotprefixError):
    """The engine process or thread ended; no answer will come from it."""


class ProtocolError(HotprefixError):
    """A driver broke the kernel's call order (unknown id, commit of a plan never made): a bug of ours."""
