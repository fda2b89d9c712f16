"""Which folder may import which. The kernel is pure: what it may import is listed, the rest is forbidden."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import hotprefix

ROOT = Path(hotprefix.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))

KERNEL_MAY_IMPORT = frozenset(
    {"__future__", "abc", "bisect", "collections", "dataclasses", "enum", "hashlib", "heapq", "itertools"}
    | {"math", "numpy", "types", "typing"}
)
SYS_ATTRIBUTES = frozenset({"byteorder"})
NUMPY_BANNED = frozenset({"random", "load", "save", "memmap", "fromfile", "datetime64"})
BUILTINS_BANNED = frozenset(
    {"open", "print", "input", "exec", "eval", "__import__", "breakpoint", "id", "hash"}
)

# A layer may import itself and the layers listed. The list has no circle, so "downwards" means something.
LAYERS = {
    "__version__": set(),
    "errors": set(),
    "userdir": set(),
    "options": {"errors"},
    "definitions": {"options"},
    "compiled": {"userdir"},
    "kernel": {"errors"},
    "cost": {"errors", "kernel"},
    "fleet": {"errors", "cost"},
    "engine": {"errors", "options", "definitions", "kernel", "cost", "userdir"},
    "records": {"__version__", "errors", "definitions", "kernel", "engine"},
    "server": {"__version__", "errors", "options", "kernel", "cost", "engine", "records"},
    "router": {
        "__version__", "errors", "options", "kernel", "cost", "fleet", "engine", "records", "server",
    },
    "localfleet": {"errors", "options", "definitions", "engine", "router", "server"},
    "lab": {"__version__", "errors", "definitions", "kernel", "cost", "fleet", "engine", "records"},
    "report": {"errors", "lab", "records"},
    "bench": {"__version__", "errors", "kernel", "engine", "server", "localfleet", "report"},
    "commands": {
        "errors", "options", "definitions", "compiled", "cost", "engine", "server", "router", "localfleet",
        "lab", "report",
    },
    "cli": {
        "__version__", "errors", "compiled", "definitions", "kernel", "engine", "server", "localfleet",
        "report", "bench", "commands",
    },
    "__init__": {"compiled"},
    "__main__": {"cli"},
    "fleet_child": {"__main__"},
}  # fmt: skip
BELOW = {"kernel", "errors", "definitions", "compiled", "userdir"}


def layer(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    """Every module a file imports, wherever in the file, by its full dotted name."""
    package = name_of(path) if path.name == "__init__.py" else name_of(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, node.module] if node.module else base)
            yield from (f"{module}.{alias.name}" for alias in node.names)


def test_there_is_something_to_check() -> None:
    assert {"kernel", "engine", "errors"} <= {layer(p) for p in MODULES}
    assert "hotprefix.kernel.cache.node.walk" in set(imports(ROOT / "kernel/cache/tree.py"))


PRICES = ROOT / "cost/prices.py"  # the part of the cost model that the fleet shares, as pure as itself


@pytest.mark.parametrize(
    "path", [p for p in MODULES if layer(p) in ("kernel", "fleet") or p == PRICES], ids=name_of
)
def test_kernel_and_fleet_import_only_what_is_pure(path: Path) -> None:
    own = {"errors", layer(path)}
    for name in imports(path):
        top = name.partition(".")[0]
        inside = name.startswith("hotprefix.") and name.split(".")[1] in own
        inside = inside or (layer(path) == "fleet" and name == f"{name_of(PRICES)}.Prices")
        assert inside or top in KERNEL_MAY_IMPORT or name == "sys", f"{name_of(path)} imports {name}"
        assert not (top == "numpy" and NUMPY_BANNED & set(name.split("."))), name
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            where = f"{name_of(path)}:{node.lineno} uses {node.value.id}.{node.attr}"
            assert node.value.id != "sys" or node.attr in SYS_ATTRIBUTES, where
            assert node.value.id not in ("np", "numpy") or node.attr not in NUMPY_BANNED, where
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in BUILTINS_BANNED, f"{name_of(path)}:{node.lineno} calls {node.func.id}"


# The kernel's own floors, the lowest first: what goes in and out, pages and trees, what the kernel remembers,
# what decides, the edge.
KERNEL_FLOORS = (
    {"tokens", "request", "config", "plan", "sources", "counters", "events"}, {"cache"}, {"state"}, {"sched"},
    {"kernel"},
)  # fmt: skip


def kernel_floor(module: str) -> int:
    """The floor of a module of the kernel, given by its full dotted name."""
    part = module.split(".")[2]
    return next(i for i, floor in enumerate(KERNEL_FLOORS) if part in floor)


@pytest.mark.parametrize(
    "path", [p for p in MODULES if layer(p) == "kernel" and name_of(p) != "hotprefix.kernel"], ids=name_of
)
def test_the_kernel_s_floors_import_downwards_only(path: Path) -> None:
    for name in imports(path):
        if name.startswith("hotprefix.kernel."):
            assert kernel_floor(name) <= kernel_floor(name_of(path)), f"{name_of(path)} imports {name}"


def test_the_layers_have_an_order() -> None:
    order = list(TopologicalSorter(LAYERS).static_order())
    assert set(order) == set(LAYERS), "a layer is named that has no entry of its own"
    assert order.index("report") < order.index("bench") < order.index("cli")


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_layers_import_downwards_only(path: Path) -> None:
    own = layer(path)
    for name in imports(path):
        if name.startswith("hotprefix."):
            other = name.split(".")[1]
            assert other == own or other in LAYERS[own], f"{name_of(path)} imports {name}"


def loaded_by(*modules: str) -> set[str]:
    """Names of the modules that a fresh interpreter holds after importing these."""
    code = f"import sys, importlib\nfor m in {modules!r}: importlib.import_module(m)\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_kernel_loads_nothing_heavy() -> None:
    modules = [name_of(p) for p in MODULES if layer(p) == "kernel"]
    names = loaded_by(*modules)
    assert "hotprefix.kernel.kernel" in names
    heavy = {"torch", "starlette", "uvicorn", "asyncio", "pydantic", "transformers", "tokenizers", "rich"}
    ours_above = {n for n in names if n.startswith("hotprefix.") and n.split(".")[1] in LAYERS.keys() - BELOW}
    assert not heavy & names
    assert not ours_above


def tops(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def test_the_entry_point_loads_nothing_because_each_process_we_start_imports_it_again() -> None:
    names = loaded_by("hotprefix.__main__")
    assert {n for n in names if n.startswith("hotprefix")} == {
        "hotprefix", "hotprefix.__main__", "hotprefix.compiled", "hotprefix.userdir"
    }  # fmt: skip
    assert not {"typer", "rich"} & names
    script = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text())["project"]["scripts"]
    assert script == {"hotprefix": "hotprefix.__main__:main"}


def test_help_loads_no_command() -> None:
    names = loaded_by("hotprefix.cli")
    assert "hotprefix.commands.replay" in names
    assert not {"numpy", "polars", "pydantic", "matplotlib", "torch", "asyncio"} & names
    assert {n for n in names if n.startswith(("hotprefix.lab", "hotprefix.engine.", "hotprefix.report"))} == {
        "hotprefix.engine.config"  # what options are
    }


def test_a_run_of_a_sweep_loads_what_it_computes_with_and_no_more() -> None:
    names = loaded_by("hotprefix.lab.experiment.task")
    assert {"polars", "hotprefix.kernel.kernel", "hotprefix.lab.sim.simulate"} <= names
    assert not {"matplotlib", "scipy", "jinja2", "typer", "rich", "torch"} & tops(names)
    assert not {n for n in names if n.startswith(("hotprefix.engine", "hotprefix.report", "hotprefix.bench"))}
    assert not {f"hotprefix.lab.trace.{n}" for n in ("azure", "eventlog", "generate.registry")} & names


def test_a_replay_s_report_needs_neither_engine_nor_bench() -> None:
    names = loaded_by("hotprefix.report.replay.write_files", "hotprefix.lab.experiment.one_run")
    assert "matplotlib" in names
    assert not {"torch", "matplotlib.pyplot"} & names
    assert not {n for n in names if n.startswith(("hotprefix.engine", "hotprefix.bench", "hotprefix.server"))}


def test_pricing_a_step_or_a_session_s_return_loads_no_configuration_library() -> None:
    names = loaded_by(*(f"hotprefix.cost.{name}" for name in ("prices", "features", "return_times")))
    assert "hotprefix.cost.prices" in names
    assert not {"pydantic", "polars", "torch"} & tops(names)
    assert not {n for n in names if n.startswith(("hotprefix.lab", "hotprefix.engine"))}
