"""Finished runs on disk. Owns: the layout of OUT/runs and what makes a run there count as finished.

    OUT/.lock                      held while a process works in this folder
    OUT/experiment.json            which experiment this folder holds
    OUT/runs/<key>/*.parquet       the tables of one run
    OUT/runs/<key>/run.json        its counters, and size and digest of every table
    OUT/runs/<key>.failed.json     why the last attempt had no result

Rules:
1. A run's folder appears whole (written beside, then renamed) or not at all.
2. A run that is there counts only if every digest fits, so a cut or damaged run is done again.
3. Keys name content: equal settings, seed, trace and version give the same key.
4. One process at a time works in a folder. A second one would take what the first is writing for something
   left over.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from hotprefix.errors import HotprefixError, InputError

_MARK = "experiment.json"


@dataclass(frozen=True, slots=True)
class Output:
    """What a run leaves: tables by name, and facts (JSON)."""

    tables: dict[str, pl.DataFrame]
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a run has no result. error: its message. trace: where it happened, for developers."""

    error: str
    trace: str = ""

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """The failure of an exception. The messages of our own errors are enough; others get their type and
        their place."""
        if isinstance(error, HotprefixError):
            return cls(str(error))
        return cls(f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))


class RunStore:
    """The runs of one output folder."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.runs = out / "runs"

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes out of the folder meanwhile. Raises InputError if one is at work in it, or if
        it cannot be written."""
        try:
            self.runs.mkdir(parents=True, exist_ok=True)
            lock = (self.out / ".lock").open("w")
        except OSError as error:
            raise self._unwritable(error) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    f"--out {self.out}: another replay is writing there; wait for it, or give another folder",
                    param="out",
                ) from None
            yield

    def _unwritable(self, error: OSError) -> InputError:
        return InputError(
            f"--out {self.out}: {error.strerror}; give a folder that can be written", param="out"
        )

    def claim(self, identity: str, name: str, *, force: bool) -> None:
        """Make the folder this experiment's. force: take over a folder that holds another experiment;
        finished runs with equal keys are used again. Raises InputError if it holds another one and `force` is
        not given."""
        mark = self.out / _MARK
        try:
            self.runs.mkdir(parents=True, exist_ok=True)
            held = json.loads(mark.read_text(encoding="utf-8")) if mark.exists() else None
            if held is not None and held["hash"] != identity and not force:
                raise InputError(
                    f"--out {self.out}: holds {held['name']} {held['hash'][:12]}, this is {name} "
                    f"{identity[:12]}; give another folder, or --force to replace it",
                    param="out",
                )
            write_whole(mark, json.dumps({"name": name, "hash": identity}).encode() + b"\n")
        except OSError as error:
            raise self._unwritable(error) from error
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise InputError(f"{mark}: damaged; remove it or give another folder", param="out") from error

    def finished(self, key: str) -> bool:
        """Whether the run is there, whole and undamaged."""
        folder = self.runs / key
        try:
            told = json.loads((folder / "run.json").read_text(encoding="utf-8"))["tables"]
            return all(_digest(_table(folder, name)) == digest for name, digest in told.items())
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def save(self, key: str, output: Output) -> None:
        """Keep a run."""
        part = self.runs / f".{key}.{os.getpid()}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            for name, table in output.tables.items():
                table.write_parquet(_table(part, name), compression="zstd")
            told = {name: _digest(_table(part, name)) for name in output.tables}
            text = json.dumps({"facts": output.facts, "tables": told}, indent=1, sort_keys=True)
            (part / "run.json").write_text(text + "\n", encoding="utf-8")
            shutil.rmtree(self.runs / key, ignore_errors=True)
            part.rename(self.runs / key)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        self._failure(key).unlink(missing_ok=True)

    def fail(self, key: str, failure: Failure) -> None:
        """Keep why a run has no result. It is tried again next time."""
        text = json.dumps({"error": failure.error, "trace": failure.trace}, indent=1)
        write_whole(self._failure(key), text.encode() + b"\n")

    def failure(self, key: str) -> Failure | None:
        """Why the last attempt failed, if it did."""
        try:
            return Failure(**json.loads(self._failure(key).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None

    def scan(self, key: str, table: str) -> pl.LazyFrame:
        return pl.scan_parquet(_table(self.runs / key, table))

    def facts(self, key: str) -> dict[str, Any]:
        told = json.loads((self.runs / key / "run.json").read_text(encoding="utf-8"))
        facts: dict[str, Any] = told["facts"]
        return facts

    def tidy(self) -> None:
        """Remove what interrupted runs left half written."""
        for part in self.runs.glob(".*.part"):
            shutil.rmtree(part, ignore_errors=True)

    def _failure(self, key: str) -> Path:
        return self.runs / f"{key}.failed.json"


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_bytes(data)
    part.replace(path)


def _table(folder: Path, name: str) -> Path:
    return folder / f"{name}.parquet"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
