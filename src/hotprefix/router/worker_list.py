"""The list of workers, kept up to date. Owns: `WorkerList`: what was given, a file that is read again, and
names that are resolved again.

Rules: a file that cannot be read, or has a typo, changes nothing: the workers stay as they were, and the
error is said once. A name that does not resolve keeps the addresses that it had.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from urllib.parse import urlsplit

from hotprefix.errors import ConfigError
from hotprefix.router.roster import Roster
from hotprefix.router.worker import Say
from hotprefix.router.worker_spec import WorkerSpec, parse_all, parse_lines


class WorkerList:
    """given: as the option names them. Raises ConfigError if the file cannot be used at the start."""

    def __init__(self, given: tuple[str, ...], file: str | None, say: Say) -> None:
        self._given, self._say = parse_all(given), say
        self._file = None if file is None else Path(file)
        self._in_file: tuple[WorkerSpec, ...] = ()
        self._text: str | None = None
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._wrong: dict[str, str] = {}
        if self._file is not None:
            self._in_file = self._read(self._file)

    async def now(self) -> dict[str, WorkerSpec]:
        """The workers that there are to be, by name."""
        if self._file is not None:
            try:
                self._in_file = await asyncio.to_thread(self._read, self._file)
                self._wrong.pop("file", None)
            except ConfigError as error:
                self._once("file", f"{error}; the workers stay as they were")
        found: dict[str, WorkerSpec] = {}
        for spec in (*self._given, *self._in_file):
            for each in await self._resolved(spec) if spec.dns else (spec,):
                found.setdefault(each.name, each)
        return found

    async def follow(self, roster: Roster, every_s: float) -> None:
        """Bring the roster up to date, again and again. Workers that were added otherwise are left alone."""
        while True:
            await asyncio.sleep(every_s)
            wanted = await self.now()
            for name, worker in list(roster.workers.items()):
                gone = wanted.get(name) != worker.spec
                if worker.listed and gone and not worker.draining:
                    roster.remove(name)
            for name, spec in wanted.items():
                if name not in roster.workers:
                    self._add(roster, spec)
            roster.tidy()

    def _add(self, roster: Roster, spec: WorkerSpec) -> None:
        try:
            roster.add(spec, listed=True)
            self._wrong.pop(spec.name, None)
        except ConfigError as error:
            self._once(spec.name, str(error))

    def _read(self, file: Path) -> tuple[WorkerSpec, ...]:
        """Raises ConfigError."""
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"worker file {file}: {error}", param="worker_file") from error
        if text == self._text:
            return self._in_file
        found = parse_lines(text, f"worker file {file}")
        self._text = text
        return found

    async def _resolved(self, spec: WorkerSpec) -> tuple[WorkerSpec, ...]:
        parts = urlsplit(spec.url)
        try:
            told = await asyncio.get_running_loop().getaddrinfo(
                parts.hostname, parts.port or 80, type=socket.SOCK_STREAM
            )
            hosts = sorted({str(each[4][0]) for each in told})
            self._addresses[spec.name] = tuple(f"[{host}]" if ":" in host else host for host in hosts)
            self._wrong.pop(spec.url, None)
        except OSError as error:
            self._once(
                spec.url, f"worker {spec.url}: the name has no address ({error}); it is resolved again"
            )
        return tuple(spec.at(address) for address in self._addresses.get(spec.name, ()))

    def _once(self, what: str, message: str) -> None:
        if self._wrong.get(what) != message:
            self._wrong[what] = message
            self._say(message)
