"""`hotprefix compile`. Owns: making the native copy that `hotprefix.compiled` finds.

Rules: mypyc turns the same annotated sources into C; nothing is written twice. A copy appears under its name
complete or not at all, so commands may run and compile at the same time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from hotprefix import compiled
from hotprefix.errors import ConfigError, HotprefixError

stderr = Console(stderr=True)

TIMEOUT_S = 1800
# mypyc reads the types of imported packages, and all of polars takes minutes. These need not be read.
SETTINGS = """[mypy]
[mypy-polars.*,pydantic.*,scipy.*]
follow_imports = skip
"""
SCRIPT = """
import sys
from mypyc.build import mypycify
from setuptools import setup
level, *modules = sys.argv[1:]
extensions = mypycify(
    ["--config-file=settings.ini", *modules], opt_level=level, debug_level="0", group_name="hotprefix.native"
)
setup(name="hotprefix-native", packages=[], ext_modules=extensions, script_args=["build_ext", "--inplace"])
"""


class CompileFailed(HotprefixError):
    """mypyc or the C compiler failed. The message ends with what it printed."""


def compile_() -> None:
    """Compile the kernel and the simulator: replays take half the time, with the same results.

    Takes a minute or two. Needs a C compiler and `pip install 'hotprefix\\[compile]'`. Commands use the copy
    from then on, as long as the sources are those it was made from.

    Example: hotprefix compile
    """
    package = Path(__file__).parents[1]
    target = compiled.folder() / compiled.digest(package)
    if target.exists():
        stderr.print(f"{target}: there already", markup=False, soft_wrap=True)
        _tell_others(target)
        return
    for module in ("mypyc", "setuptools"):
        if find_spec(module) is None:
            raise ConfigError(f"{module} is not installed: pip install 'hotprefix[compile]'")
    begun = time.perf_counter()
    with stderr.status("compiling; about a minute"):
        build(package, target)
    stderr.print(f"{target}: {time.perf_counter() - begun:.0f} s", markup=False, soft_wrap=True)
    _tell_others(target)


def _tell_others(target: Path) -> None:
    """Tell how much room copies of other sources take. None is deleted here, because another checkout may be
    running one."""
    others = [place for place in target.parent.iterdir() if place != target]
    if others:
        size = sum(file.stat().st_size for place in others for file in place.rglob("*") if file.is_file())
        stderr.print(
            f"{target.parent}: {len(others)} of other sources, {size / 1e6:.0f} MB; delete those folders "
            "that no other checkout or version uses",
            markup=False, soft_wrap=True,
        )  # fmt: skip


def build(package: Path, target: Path, optimise: int = 1) -> None:
    """Make a copy of the package's sources, unless it exists by then. optimise: the C compiler's level.
    Raises CompileFailed and OSError."""
    compiled.folder().mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as place:
        copy = Path(place) / package.name
        shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
        _translate(Path(place), [Path(package.name) / path for path in compiled.native(package)], optimise)
        for entry in copy.iterdir():
            if entry.name not in compiled.PACKAGES and not entry.name.startswith("native__mypyc."):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        copy.chmod(0o700)
        _put(copy, target)


def _translate(place: Path, modules: list[Path], optimise: int) -> None:
    """Build extension modules beside the sources below `place`."""
    (place / "settings.ini").write_text(SETTINGS, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(optimise), *map(str, modules)], cwd=place, text=True, check=False,
        capture_output=True, timeout=TIMEOUT_S, env={**os.environ, "HOTPREFIX_INTERPRETED": "1"},
    )  # fmt: skip
    if done.returncode:
        raise CompileFailed(f"cannot compile: {(done.stdout + done.stderr).strip()[-2000:]}")


def _put(copy: Path, target: Path) -> None:
    """Rename the copy to its final name. If another process was quicker, its copy is as good."""
    try:
        copy.rename(target)
    except OSError:
        if not target.exists():
            raise
