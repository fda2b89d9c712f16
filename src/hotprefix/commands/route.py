"""`hotprefix route`. Owns: its arguments."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from hotprefix.commands.options import filled, takes
from hotprefix.errors import ConfigError
from hotprefix.router.config import SHARED, RouterConfig
from hotprefix.server.config import ServerConfig


@takes(RouterConfig, ServerConfig, only=(*SHARED, *RouterConfig.__dataclass_fields__))
def route(**given: Any) -> None:
    """Route requests to engines: own ones, vLLM, or any server with OpenAI's API.

    docs/router.md says how a worker is chosen and what happens when one fails.

    Example: hotprefix route --worker http://10.0.0.5:8000 --worker http://10.0.0.7:8000,kind=vllm
    """
    if find_spec("aiohttp") is None:
        raise ConfigError("this command needs the router's dependencies: pip install 'hotprefix[engine]'")
    from hotprefix.router.serve import route as run_router

    run_router(filled(RouterConfig, given), filled(ServerConfig, given))
