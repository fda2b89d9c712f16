"""How long a step takes. Owns: `CostModel`, its JSON file, and the record of where its figures come from.

Rules: every coefficient is a price in seconds, never negative. The price of a position or a decode may change
with their number in the step (`Beyond`). A file says what was measured, on which machine, when, and how far
off it is. A file that is damaged, of another version or has an impossible value is refused.
"""

from __future__ import annotations

import datetime as dt
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hotprefix.cost.prices import Curve, Prices
from hotprefix.errors import InputError

VERSION: Final = 2
READS: Final = (1, 2)

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]


class _Frozen(BaseModel):
    # defer_build: a run's process gets its cost model pickled and validates nothing, so it needs no validator
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


class Link(_Frozen):
    """One direction between two tiers: seconds before the first byte, then bytes per second."""

    latency_s: Seconds
    bytes_per_s: Rate

    def seconds(self, size: int) -> float:
        """How many seconds `size` bytes take if nothing else uses the link."""
        return self.latency_s + size / self.bytes_per_s


class Links(_Frozen):
    """The links below L1. None: not known; a replay that needs such a link must be given it.

    save: L1 to L2.
    restore: L2 to L1.
    put: L2 to L3.
    fetch: L3 to L2.
    """

    save: Link | None = None
    restore: Link | None = None
    put: Link | None = None
    fetch: Link | None = None


class ErrorOf(_Frozen):
    """The absolute error of predicted step times, as a share of the measured ones.

    samples: how many steps.
    median, p95: of the errors of these steps.
    """

    samples: Count
    median: Share
    p95: Share


class Beyond(_Frozen):
    """A change of price: in one step, each position or decode after the first `after` costs `each_s`."""

    after: Count
    each_s: Seconds


Beyonds = Annotated[tuple[Beyond, ...], Field(strict=False)]


class FitError(_Frozen):
    """How far off the model is on steps that the fit did not see.

    method: how this was found out.
    overall: over all steps.
    prefill, decode, mixed: over the steps of one regime; None if there are none.
    bias: (sum predicted - sum measured) / sum measured, over all steps.
    uncertainty: the standard error of the predicted sum, as a share of the measured sum, by leaving out
    batches (delete-a-group jackknife). None: not known. It does not cover a machine that is faster or slower
    at another time.
    """

    method: Text
    overall: ErrorOf
    prefill: ErrorOf | None = None
    decode: ErrorOf | None = None
    mixed: ErrorOf | None = None
    bias: Annotated[float, Field(allow_inf_nan=False)]
    uncertainty: Share | None = None


class CostModel(_Frozen):
    """The time of a forward pass and of planning it, and the size of what is copied.

    name, source: what the model is, and where its figures come from, for people.
    model, dtype, hardware, date: what was measured and when (for a published preset: when its sources were
    read).

    Prices, seconds:
    base_s: of a step.
    prefill_token_s: of a position in a chunk of more than one.
    prefill_token_beyond: changes of that price with the number of such positions in one step.
    prefill_context_s: of a pair of such a position and a position that it attends to.
    decode_s: of a chunk of one position.
    decode_beyond: changes of that price with the number of such chunks in one step. Example: with a decode_s
    of 3 ms, and a decode_beyond of 5 ms after 8, 10 decodes cost 8 * 3 + 2 * 5 = 34 ms, beside the step's
    other terms.
    decode_context_s: of a position that such a chunk attends to.
    scheduler_base_s, scheduler_running_s, scheduler_waiting_s: of a step outside its forward pass, of a
    running request in it, and of a waiting request.
    refresh_touch_s: beside that, of each prefix that waiting-prefix refresh touches. None: not known, or
    already part of scheduler_waiting_s; then replays do not measure what refresh costs the scheduler.

    kv_token_bytes: keys and values of one token in all layers.
    links: the copies between tiers.
    fit: how far off the prices are; None if nothing was fitted.
    """

    version: Literal[1, 2] = VERSION
    name: Text
    source: Text
    model: Text
    dtype: Text
    hardware: Text
    date: Annotated[dt.date, Field(strict=False)]
    base_s: Seconds
    prefill_token_s: Seconds
    prefill_token_beyond: Beyonds = ()
    prefill_context_s: Seconds
    decode_s: Seconds
    decode_beyond: Beyonds = ()
    decode_context_s: Seconds
    scheduler_base_s: Seconds
    scheduler_running_s: Seconds
    scheduler_waiting_s: Seconds
    refresh_touch_s: Seconds | None = None
    kv_token_bytes: Count
    links: Links = Links()
    fit: FitError | None = None

    @model_validator(mode="after")
    def _takes_time(self) -> Self:
        """Refuse a model in which a step takes no time: a replay could go on for ever at one moment."""
        if self.base_s + min(self.prefill_token_s, self.decode_s) <= 0:
            raise ValueError("base_s and one of prefill_token_s and decode_s are 0: a step takes time")
        return self

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        for name in ("prefill_token_beyond", "decode_beyond"):
            after = [beyond.after for beyond in getattr(self, name)]
            if after != sorted(set(after)):
                raise ValueError(f"{name}: `after` must grow, it is {after}")
        return self

    @property
    def prices(self) -> Prices:
        """The prices in the form that computes a step's time fastest."""
        return Prices(
            self.base_s, _curve(self.prefill_token_s, self.prefill_token_beyond), self.prefill_context_s,
            _curve(self.decode_s, self.decode_beyond), self.decode_context_s,
            self.scheduler_base_s, self.scheduler_running_s, self.scheduler_waiting_s,
            self.refresh_touch_s or 0.0,
        )  # fmt: skip

    def scaled(self, by: float) -> CostModel:
        """The model of a machine on which forward passes and planning take `by` times as long. Links stay as
        they are."""
        known = {name: getattr(self, name) for name in type(self).model_fields if name.endswith("_s")}
        prices = {name: price * by for name, price in known.items() if price is not None}
        beyond = {
            name: tuple(Beyond(after=b.after, each_s=b.each_s * by) for b in getattr(self, name))
            for name in ("prefill_token_beyond", "decode_beyond")
        }
        return self.model_copy(update={**prices, **beyond})

    @property
    def label(self) -> str:
        """One line for reports: source and error."""
        error = "no fit error known"
        if self.fit is not None:
            of = self.fit.overall
            error = f"step time error median {of.median:.1%}, p95 {of.p95:.1%} ({self.fit.method})"
        return (
            f"{self.name}: {self.model}, {self.dtype}, {self.hardware}, {self.date}; {error}; {self.source}"
        )

    # -- its file ---------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all. Raises InputError if it cannot be written."""
        write_json(path, self, "the cost model")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file that `save` wrote. Raises InputError if it is absent, damaged, of another version, or
        has an impossible value."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise InputError(f"{path}: cannot read the cost model: {reason}", param="cost") from error
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, where: str) -> Self:
        """The model in a file's text. where: the file's name for messages. Raises InputError."""
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(
                f"{where}: damaged, not JSON (line {error.lineno}: {error.msg}): calibrate again",
                param="cost",
            ) from error
        _check_version(found, where)
        try:
            return cls.model_validate(found)
        except ValidationError as error:
            raise InputError(f"{where}: {_first(error)}", param="cost") from error


def write_json(path: Path, content: BaseModel, what: str) -> None:
    """Write a file as JSON, whole or not at all. what: the content, for the message. Raises InputError if it
    cannot be written."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(content.model_dump_json(indent=2) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise InputError(f"{path}: cannot write {what}: {error.strerror}", param="out") from error


def _curve(first: float, beyond: Beyonds) -> Curve:
    return ((0, first), *((step.after, step.each_s) for step in beyond))


def _check_version(found: Any, where: str) -> None:
    if not isinstance(found, dict) or "version" not in found:
        raise InputError(f"{where}: no cost model (it has no version): calibrate again", param="cost")
    if found["version"] not in READS:
        raise InputError(
            f"{where}: cost model version {found['version']!r}, this reads {' and '.join(map(str, READS))}: "
            "calibrate again",
            param="cost",
        )


def _first(error: ValidationError) -> str:
    """The first fault of a file, with the value at fault."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    if not field:
        return str(first["ctx"]["error"]) if "ctx" in first else first["msg"]
    value = "" if first["type"] == "missing" else f"={first['input']!r}"
    return f"{field}{value}: {first['msg']}"
