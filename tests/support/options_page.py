"""The pages with options, made of the configurations: `docs/policies.md`, and the end of `docs/router.md`.
`python -m tests.support.options_page` writes them."""

from __future__ import annotations

from pathlib import Path

from hotprefix.commands.options import as_typed
from hotprefix.definitions import Slo
from hotprefix.engine.config import EngineConfig
from hotprefix.options import Group, Setting, settings
from hotprefix.router.config import RouterConfig
from hotprefix.server.config import ServerConfig

PAGE = Path(__file__).parents[2] / "docs" / "policies.md"
ROUTER_PAGE = PAGE.with_name("router.md")
OPTIONS = "## Options\n"
HEAD = """# Policies and options

Made from the source by `python -m tests.support.options_page`: what each option says of itself where it is
defined (`engine/config.py`, `server/config.py`, `definitions.py`, and `kernel/config.py` for the values of
policies). Do not edit it here.

`hotprefix serve` takes the options by the names below. `EngineConfig(...)` takes those of the engine by the
names of its fields: `--kv-tokens` is `kv_tokens`, `--prefetch-timeout` is `prefetch_timeout_s`. Experiments
name policies in their arms ([experiments.md](experiments.md)).
"""


def page(*configs: type) -> str:
    """The page with the options of these configurations."""
    return f"{HEAD}\n{tables(*configs)}"


def router_page() -> str:
    """docs/router.md with the router's own options at its end."""
    text = ROUTER_PAGE.read_text(encoding="utf-8")
    rows = tables(RouterConfig).replace("\n## ", "\n### ").replace("## ", "### ", 1)
    also = "And those of `hotprefix serve` for address, keys and clients ([policies.md](policies.md)).\n"
    return f"{text[: text.index(OPTIONS)]}{OPTIONS}{also}\n{rows}"


def tables(*configs: type) -> str:
    """A table for each group of options."""
    every = [one for config in configs for one in settings(config)]
    flags = {one.name: one.flag for one in every if one.parameter}
    parts = []
    for group in Group:
        rows = [one for one in every if one.option.group is group]
        if rows:
            parts.append(f"## {group}\n\n| Option | Default | What it does |\n| --- | --- | --- |")
            parts.append("\n".join(_row(one, flags) for one in rows) + "\n")
            parts += [_values(one) for one in rows if one.choices]
    return "\n".join(parts)


def _row(one: Setting, flags: dict[str, str]) -> str:
    name = f"`{one.flag}`" if one.parameter else f"`{one.name}` (library)"
    what = f"{name} {one.option.unit} {one.option.range}".strip()
    default = one.option.unset or (str(one.default).lower() if one.kind is bool else one.default)
    needs = f" Needs {as_typed(one.option.needs[0], flags)}." if one.option.needs else ""
    return f"| {what} | {default} | {one.option.help}{needs} |".replace("|  |", "| |")


def _values(one: Setting) -> str:
    lines = [f"- `{value}`: {help}" for value, help in one.choices.items()]
    return "\n".join([f"`{one.flag}`:", "", *lines, ""])


if __name__ == "__main__":
    PAGE.write_text(page(ServerConfig, EngineConfig, Slo), encoding="utf-8")
    ROUTER_PAGE.write_text(router_page(), encoding="utf-8")
