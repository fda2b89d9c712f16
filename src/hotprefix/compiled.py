"""The kernel and the simulator as native code, if the user had them compiled. Owns: finding such a copy.

Rules: the Python sources stay the truth. A copy (`hotprefix compile`, commands/compile.py) is named by the
digest of every file that it was made from and of this Python's binary interface. So if a source was edited,
or the version or the Python is another one, no copy fits, and the sources are interpreted. A copy in a folder
that other users can write to is never used. Nothing depends on which of the two runs: both give the same
bytes. HOTPREFIX_INTERPRETED=1 leaves copies alone (the tests do).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from hotprefix.userdir import default_cache_dir, private

# The packages that a copy holds whole. Native in it are the modules that each step of a replay runs through;
# configurations are not, because pydantic builds them from annotations, which native classes do not keep.
PACKAGES = ("fleet", "kernel", "lab")
NATIVE = (
    "fleet/*.py", "kernel/*.py", "kernel/cache/*.py", "kernel/sched/*.py", "lab/cost/features.py",
    "lab/cost/prices.py",
    "lab/sim/cluster.py", "lab/sim/instance.py", "lab/sim/block_prompts.py", "lab/sim/replay_recorder.py",
    "lab/sim/lower_tiers.py", "lab/sim/arrivals.py", "lab/trace/ideal.py",
)  # fmt: skip
INTERPRETED = ("fleet/config.py", "kernel/config.py")


def search_path(source: Iterable[str]) -> list[str]:
    """The folders to search for the package's parts: first a fitting copy, if there is one."""
    places = list(source)
    copies = folder()
    if os.environ.get("HOTPREFIX_INTERPRETED", "0") not in ("", "0") or not private(copies):
        return places
    copy = copies / digest(Path(places[0]))
    return [str(copy), *places] if private(copy) else places


def folder() -> Path:
    """The folder in which copies are kept."""
    return default_cache_dir() / "compiled"


def digest(package: Path) -> str:
    """The name of a copy of these sources. Raises OSError."""
    found = hashlib.sha256(EXTENSION_SUFFIXES[0].encode())
    for path in sources(package):
        for part in (path.relative_to(package).as_posix().encode(), path.read_bytes()):
            found.update(len(part).to_bytes(8, "little"))
            found.update(part)
    return found.hexdigest()[:24]


def sources(package: Path) -> Iterator[Path]:
    """Every file that a copy is made from, in a fixed order."""
    yield package / "compiled.py"
    for name in PACKAGES:
        for place, folders, files in os.walk(package / name):
            folders[:] = sorted(f for f in folders if f != "__pycache__")
            yield from (Path(place, file) for file in sorted(files))


def in_use() -> bool:
    """Whether this process runs a copy. Only for showing it."""
    return len(import_module("hotprefix").__path__) > 1


def native(package: Path) -> list[Path]:
    """The modules to be compiled, relative to the package."""
    found = {path.relative_to(package) for pattern in NATIVE for path in package.glob(pattern)}
    return sorted(p for p in found if p.name != "__init__.py" and p.as_posix() not in INTERPRETED)
