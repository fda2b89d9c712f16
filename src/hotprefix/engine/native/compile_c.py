"""Compiles and loads the C kernels. Owns: the compiler call, the build cache, the shared library.

Rules: a build needs a C compiler, and no Python headers. It is named by the digest of everything that went
into it (sources, flags, compiler, processor), written under a temporary name and renamed, so processes may
build at the same time and never see half a file. The library links no OpenMP runtime: it is given two entry
points of the one that torch has loaded, and uses its threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from hotprefix.errors import HotprefixError
from hotprefix.userdir import default_cache_dir, private

_HERE = Path(__file__).parent
_BASE_FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC", "-w")
_TUNINGS = (("-march=native",), ("-mcpu=native",), ())
_TIMEOUT_S = 300
_log = logging.getLogger(__name__)


class NativeUnavailable(HotprefixError):
    """The kernels cannot be built or loaded here; the message says why and what would help."""


@cache
def load() -> ctypes.CDLL | None:
    """The kernels' library. The first call on a machine builds it, which takes some seconds. None, with one
    warning, if it cannot be built or loaded."""
    try:
        return build()
    except NativeUnavailable as error:
        _log.warning("native kernels are off, torch computes instead (several times slower): %s", error)
        return None


def build(extra_flags: Sequence[str] = (), directory: Path | None = None) -> ctypes.CDLL:
    """Compile and load the library; compiles nothing if the directory has this build already. Raises
    NativeUnavailable.

    extra_flags: compiler flags, put after our own.
    directory: where builds are kept; None: the user's cache.
    """
    compiler = _compiler()
    name = f"kernels-{_digest(compiler, extra_flags)}.so"
    directory = directory or _cache_directory()
    target = directory / name
    if not target.exists():
        _compile(compiler, extra_flags, target)
    return _open(target)


def _compiler() -> str:
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and (found := shutil.which(name)):
            return found
    raise NativeUnavailable("no C compiler found: install gcc or clang, or name one in CC")


def _sources() -> list[Path]:
    return sorted(_HERE.glob("*.c"))


def _digest(compiler: str, extra_flags: Sequence[str]) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False, timeout=60).stdout
    digest = hashlib.sha256()
    files = [*_sources(), *sorted(_HERE.glob("*.h"))]
    parts = [part for path in files for part in (path.name.encode(), path.read_bytes())]
    for part in (*parts, version, repr((_BASE_FLAGS, tuple(extra_flags))).encode(), _processor().encode()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:24]


def _processor() -> str:
    """The processor that -march=native means here. It is part of a build's name, because machines with
    different processors may share a cache directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    marks = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU ")
    return platform.machine() + "".join(dict.fromkeys(line for line in lines if line.startswith(marks)))


def _cache_directory() -> Path:
    """The user's cache. If other users could write to it (its files are executed), or if we cannot, a fresh
    directory for this process."""
    directory = default_cache_dir() / "native"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if private(directory) and os.access(directory, os.W_OK):
            return directory
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="hotprefix-native-"))


def _compile(compiler: str, extra_flags: Sequence[str], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=target.parent, suffix=".part")
    os.close(handle)
    try:
        for tuning in _TUNINGS:
            flags = [*_BASE_FLAGS, *tuning, *extra_flags]
            command = [compiler, *flags, *map(str, _sources()), "-o", partial, "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
            if done.returncode == 0:
                os.replace(partial, target)
                return
        raise NativeUnavailable(f"{compiler} failed: {done.stderr.strip()[-800:]}")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"cannot build with {compiler} in {target.parent}: {error}") from error
    finally:
        Path(partial).unlink(missing_ok=True)


def _open(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        run, number = _openmp()
        library.hp_init(run, number)
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"cannot load {path}: {error}") from error
    return library


def _openmp() -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    """GOMP_parallel and omp_get_thread_num of the runtime that torch uses. Opening a library by the file that
    it was loaded from gives the loaded one, not a second copy."""
    places = sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*"))
    for place in [*map(str, places), "libgomp.so.1"]:
        try:
            runtime = ctypes.CDLL(place)
            entries = runtime.GOMP_parallel, runtime.omp_get_thread_num
        except (OSError, AttributeError):
            continue
        return ctypes.cast(entries[0], ctypes.c_void_p), ctypes.cast(entries[1], ctypes.c_void_p)
    raise NativeUnavailable("torch's OpenMP runtime was not found: use a torch build with OpenMP")
