"""Our router beside others, over the same engines.

    python bench/routers.py --out routers.json         # two engines with the default model
    python bench/routers.py --engines 16 --paced llama-3.1-8b.1xh100.fp8 --slow 1
    python bench/routers.py --peer 'mine=my-router --port {port} --workers {workers}'

Starts engines, plain round robin (rr_proxy.py), our router, and each router of PEERS whose command is on
PATH, all before the same engines, and then router_load.py with round robin as the first target: so all ratios
are to it. Rounds are interleaved, every second one backwards; only one target is asked at a time, but all are
up, so a peer that spins while idle takes CPU from the others. What follows `--` goes to router_load.py:

    python bench/routers.py --rounds 1 -- --workload burst --set burst.groups=1 --set burst.copies=4
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from hotprefix.localfleet.config import LocalFleetConfig
from hotprefix.localfleet.fleet import LocalFleet
from hotprefix.server.config import ServerConfig
from hotprefix.server.listening import say

HERE = Path(__file__).parent
# Written down from their documentation; they were not run with this script.
PEERS = {
    "smg": "smg launch --host 127.0.0.1 --port {port} --worker-urls {workers} --policy cache_aware",
    "sglang-router": (
        "sglang-router launch --host 127.0.0.1 --port {port} --worker-urls {workers} --policy cache_aware"
    ),
    "vllm-router": "vllm-router --host 127.0.0.1 --port {port} --worker-urls {workers} --policy cache_aware",
    "litellm": "litellm --host 127.0.0.1 --port {port} --config {litellm}",
}
PATIENCE_S = 120.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextlib.asynccontextmanager
async def running(command: list[str], log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process in a session of its own, all of which is killed at the end."""
    with log.open("wb") as file:
        environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        process = await asyncio.create_subprocess_exec(
            *command, stdout=file, stderr=file, start_new_session=True, env=environment
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def answers(url: str, process: asyncio.subprocess.Process, log: Path) -> None:
    """Wait until a router tells its models."""
    end = time.monotonic() + PATIENCE_S
    async with aiohttp.ClientSession() as http:
        while time.monotonic() < end and process.returncode is None:
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(f"{url}/v1/models") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.1)
    told = log.read_text(errors="replace")[-1000:]
    raise SystemExit(f"{url} does not answer (exit status {process.returncode}): {told}")


def litellm_file(folder: Path, model: str, urls: list[str]) -> Path:
    """litellm reads its workers from a file."""
    path = folder / "litellm.yaml"
    rows = [
        {
            "model_name": model,
            "litellm_params": {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none"},
        }
        for url in urls
    ]
    path.write_text(json.dumps({"model_list": rows, "router_settings": {"routing_strategy": "least-busy"}}))
    return path


def chosen_peers(given: list[str]) -> dict[str, str]:
    """Commands by name: those that were given, and those of PEERS that are on PATH."""
    found = {name: command for name, command in PEERS.items() if shutil.which(command.split()[0])}
    return found | dict(text.split("=", 1) for text in given)


async def load(targets: dict[str, str], urls: list[str], page: int, args: argparse.Namespace) -> int:
    """Run router_load.py to its end. Returns its exit status."""
    out = ["--out", str(args.out)] if args.out else []
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(HERE / "router_load.py"),
        *(text for name, url in targets.items() for text in ("--target", f"{name}={url}")),
        *(text for url in urls for text in ("--worker", url)),
        "--flush", "/flush_cache", "--tokenize", urls[0], "--page", str(page), "--rounds", str(args.rounds),
        *out, *args.more,
    )  # fmt: skip
    return await process.wait()


async def main(args: argparse.Namespace) -> int:
    given: dict[str, Any] = {
        "model": args.model,
        "paced": args.paced,
        "kv_tokens": args.kv_tokens,
        "poll": args.poll,
    }
    slow = [{"pace_factor": 2.0}] * args.slow
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        fleet = await stack.enter_async_context(
            LocalFleet(LocalFleetConfig(args.engines), given, lambda line: None)
        )
        say(f"starting {args.engines} engines")
        await fleet.start_engines(*slow)
        urls = [engine.url for engine in fleet.engines]
        async with aiohttp.ClientSession() as http, http.get(f"{urls[0]}/load") as answer:
            worker = (await answer.json())["worker"]
        fields = {
            "workers": " ".join(urls), "litellm": str(litellm_file(folder, worker["model"], urls)),
        }  # fmt: skip
        commands = {"round_robin": f"{sys.executable} {HERE / 'rr_proxy.py'} {{port}} {{workers}}"}
        targets: dict[str, str] = {}
        for name, command in (commands | chosen_peers(args.peer)).items():
            port = free_port()
            words = [word.format(port=port, **fields) for word in shlex.split(command)]
            words = [part for word in words for part in (word.split() if " " in word else [word])]
            say(f"{name}: {shlex.join(words)}")
            log = folder / f"{name}.log"
            process = await stack.enter_async_context(running(words, log))
            targets[name] = f"http://127.0.0.1:{port}"
            await answers(targets[name], process, log)
        for policy in args.policy:
            port = fleet.port(ServerConfig(port=0))
            await fleet.start_router(policy, port, policy=policy)
            targets[f"hotprefix-{policy}"] = f"http://127.0.0.1:{port}"
        say(f"load on {', '.join(targets)}")
        status: list[int] = []

        async def loaded() -> None:
            status.append(await load(targets, urls, worker["page_size"], args))

        await fleet.going(loaded())
        return status[0]


def arguments() -> argparse.Namespace:
    own, _, more = " ".join(map(shlex.quote, sys.argv[1:])).partition(" -- ")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--model", default="default")
    parser.add_argument("--paced", metavar="PRESET")
    parser.add_argument("--slow", type=int, default=0, help="engines of half the speed; needs --paced")
    parser.add_argument("--kv-tokens", type=int, help="of each engine")
    parser.add_argument("--policy", action="append", help="of our routers; default: predicted")
    parser.add_argument("--poll", type=float, default=0.5, help="our router's --poll")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND",
                        help="a router more, or another command of one in PEERS")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file of router_load.py")
    args = parser.parse_args(shlex.split(own))
    args.more, args.policy = shlex.split(more), args.policy or ["predicted"]
    if args.slow and (args.paced is None or args.slow > args.engines):
        parser.error(f"--slow {args.slow}: needs --paced, and at most as many as --engines")
    return args


if __name__ == "__main__":
    sys.exit(asyncio.run(main(arguments())))
