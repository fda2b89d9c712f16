"""`hotprefix fleet`. Owns: its arguments."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from hotprefix.commands.options import filled, takes
from hotprefix.definitions import Slo
from hotprefix.engine.config import EngineConfig
from hotprefix.errors import ConfigError
from hotprefix.localfleet.config import TAKEN, LocalFleetConfig
from hotprefix.options import settings
from hotprefix.router.config import RouterConfig
from hotprefix.server.config import ServerConfig


@takes(
    LocalFleetConfig, ServerConfig, EngineConfig, Slo, RouterConfig,
    only=(*TAKEN, *(one.name for one in settings(Slo))),
)  # fmt: skip
def fleet(**given: Any) -> None:
    """Start engines and a router before them on this machine, until SIGTERM or SIGINT.

    The options are those of `serve` and `route`; docs/one-machine.md says what the fleet decides itself.

    Example: hotprefix fleet --workers 2

    Example: hotprefix fleet --workers 16 --paced llama-3.1-8b.1xh100.fp8 --kv-tokens 400000
    """
    if find_spec("torch" if given["paced"] is None else "aiohttp") is None:
        raise ConfigError("this command needs the engine's dependencies: pip install 'hotprefix[engine]'")
    config, server = filled(LocalFleetConfig, given), filled(ServerConfig, given)
    slo = filled(Slo, given)
    filled(EngineConfig, given, slo=slo)
    filled(RouterConfig, {k: v for k, v in given.items() if k != "cost"}, workers=("http://127.0.0.1:1",))
    from hotprefix.localfleet.run import run_fleet

    run_fleet(config, server, given)
