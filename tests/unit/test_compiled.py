"""A compiled copy is used only where it was made from these very sources, by this user, for this Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from hotprefix import compiled
from hotprefix.commands.compile import CompileFailed, build, compile_

PRINTS = """
import json
import hotprefix.kernel.double as m, hotprefix.kernel.config as c
import hotprefix.lab.plain as p, hotprefix.other as o
print(json.dumps([m.double(3), *(x.__file__ for x in (m, c, p, o))]))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package of the same shape, small enough to compile in a test."""
    root = tmp_path / "source" / "hotprefix"
    here = Path(compiled.__file__).parent
    for name, text in {
        "compiled.py": (here / "compiled.py").read_text(),
        "userdir.py": (here / "userdir.py").read_text(),
        "__init__.py": "from hotprefix.compiled import search_path\n__path__ = search_path(__path__)\n",
        "other.py": "",
        "kernel/__init__.py": "",
        "kernel/double.py": "def double(x: int) -> int:\n    return 2 * x\n",
        "kernel/config.py": "",
        "lab/__init__.py": "",
        "lab/plain.py": "",
        "lab/data/numbers.toml": "a = 1\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty user's cache; copies in it are to be used."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOTPREFIX_INTERPRETED", "0")
    compiled.folder().mkdir(parents=True, mode=0o700)
    return compiled.folder()


def put(package: Path) -> Path:
    """An empty copy of the package."""
    copy = compiled.folder() / compiled.digest(package)
    copy.mkdir(mode=0o700)
    return copy


def test_every_edit_of_what_is_copied_gives_another_name(package: Path) -> None:
    names = {compiled.digest(package)}
    for file in ("kernel/double.py", "lab/plain.py", "lab/data/numbers.toml", "compiled.py"):
        (package / file).write_text((package / file).read_text() + "# edited\n")
        names.add(compiled.digest(package))
    (package / "kernel/new.py").write_text("")
    names.add(compiled.digest(package))
    (package / "kernel/new.py").rename(package / "kernel/other.py")
    names.add(compiled.digest(package))
    assert len(names) == 7


def test_what_is_not_copied_does_not_change_the_name(package: Path) -> None:
    before = compiled.digest(package)
    (package / "other.py").write_text("# edited\n")
    (package / "kernel/__pycache__").mkdir()
    (package / "kernel/__pycache__/double.pyc").write_bytes(b"x")
    assert compiled.digest(package) == before


@pytest.mark.usefixtures("cache")
def test_a_fitting_copy_comes_first(package: Path) -> None:
    assert compiled.search_path([str(package)]) == [str(package)]
    copy = put(package)
    assert compiled.search_path([str(package)]) == [str(copy), str(package)]
    (package / "kernel/double.py").write_text("")
    assert compiled.search_path([str(package)]) == [str(package)]


def test_a_copy_that_others_could_have_written_is_not_used(package: Path, cache: Path) -> None:
    copy = put(package)
    for place in (copy, cache):
        place.chmod(0o770)
        assert compiled.search_path([str(package)]) == [str(package)]
        place.chmod(0o700)
    assert compiled.search_path([str(package)])[0] == str(copy)


@pytest.mark.usefixtures("cache")
def test_copies_can_be_left_alone(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(package)
    monkeypatch.setenv("HOTPREFIX_INTERPRETED", "1")
    assert compiled.search_path([str(package)]) == [str(package)]


def test_the_real_package_names_its_modules() -> None:
    package = Path(compiled.__file__).parent
    found = {path.as_posix() for path in compiled.native(package)}
    assert {"kernel/kernel.py", "kernel/cache/tree.py", "kernel/sched/planner.py"} < found
    assert {name for name in compiled.NATIVE if "*" not in name} < found
    assert "kernel/config.py" not in found
    assert all((package / name).is_file() for name in compiled.INTERPRETED)


def test_what_other_copies_take_is_told_and_left_alone(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotprefix.commands.compile.stderr", Console(stderr=True))
    (cache / compiled.digest(Path(compiled.__file__).parent)).mkdir(mode=0o700)
    compile_()
    assert "of other sources" not in capsys.readouterr().err
    (cache / "older").mkdir()
    (cache / "older" / "native.so").write_bytes(bytes(3_000_000))
    compile_()
    assert f"{cache}: 1 of other sources, 3 MB; delete" in capsys.readouterr().err
    assert (cache / "older" / "native.so").exists()


def test_it_compiles_what_is_named_and_an_edit_is_seen_at_once(package: Path, cache: Path) -> None:
    target = cache / compiled.digest(package)
    build(package, target, optimise=0)

    def run() -> list[object]:
        env = {**os.environ, "PYTHONPATH": str(package.parent)}
        done = subprocess.run(
            [sys.executable, "-c", PRINTS], env=env, capture_output=True, text=True, check=True
        )
        return json.loads(done.stdout)

    answer, double, config, plain, other = run()
    assert answer == 6
    assert str(double).startswith(f"{target}/kernel/double.")
    assert str(double).endswith((".so", ".pyd"))
    assert (config, plain) == (f"{target}/kernel/config.py", f"{target}/lab/plain.py")
    assert other == f"{package}/other.py"
    (package / "kernel/double.py").write_text("def double(x: int) -> int:\n    return 20 * x\n")
    assert run()[:2] == [60, f"{package}/kernel/double.py"]


def test_a_failed_build_says_why_and_leaves_nothing(package: Path, cache: Path) -> None:
    (package / "kernel/double.py").write_text("def double(x: int) -> int:\n    return 'two'\n")
    with pytest.raises(CompileFailed, match="Incompatible return value"):
        build(package, cache / compiled.digest(package), optimise=0)
    assert not list(cache.iterdir())


def test_a_copy_that_another_process_made_meanwhile_stays(package: Path, cache: Path) -> None:
    target = put(package)
    (target / "theirs").write_text("")
    build(package, target, optimise=0)
    assert [entry.name for entry in cache.iterdir()] == [target.name]
    assert [entry.name for entry in target.iterdir()] == ["theirs"]
