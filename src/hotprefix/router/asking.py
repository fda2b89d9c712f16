"""Asking a worker how it is. Owns: the questions for each kind of worker, and finding the kind out.

Rules:
1. An answer is bounded in size and in time; one that cannot be read counts as none, and says why in a line.
2. Nothing is asked but at the worker's own URL; redirects are not followed.
3. An own engine is asked at GET /load, vLLM at GET /metrics, all for their models at GET /v1/models.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from pydantic import ValidationError
from pydantic_core import from_json

from hotprefix.errors import shortened
from hotprefix.router.heard import EventsAt, Figures, Heard
from hotprefix.router.upstream import Upstream
from hotprefix.router.vllm_metrics import read_metrics
from hotprefix.router.worker_spec import Kind
from hotprefix.server.load_report import LoadReport

MOST_BYTES = 8 << 20
MOST_CARDS = 1000


class NoAnswer(Exception):
    """The worker could not be asked, or its answer could not be read. Its text is one line."""


class _NotThere(NoAnswer):
    """It has no such route."""


async def ask(upstream: Upstream, timeout_s: float, known: Heard | None = None) -> Heard:
    """known: an earlier answer whose model cards still hold. Raises NoAnswer."""
    try:
        async with asyncio.timeout(timeout_s):
            if upstream.kind is Kind.AUTO:
                return await _whatever(upstream, known)
            return await _ASK[upstream.kind](upstream, known)
    except TimeoutError:
        raise NoAnswer(f"no answer within {timeout_s:g} s") from None


async def _whatever(upstream: Upstream, known: Heard | None) -> Heard:
    for kind in (Kind.HOTPREFIX, Kind.VLLM):
        try:
            return await _ASK[kind](upstream, known)
        except _NotThere:
            continue
    return await _openai(upstream, known)


async def _hotprefix(upstream: Upstream, known: Heard | None) -> Heard:
    body = await _get(upstream, "/load")
    try:
        report = LoadReport.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise _NotThere(f"/load is no load report ({where}: {first['msg']})") from None
    worker, pages, told = report.worker, report.pages, report.kv_events
    if worker is None:
        raise NoAnswer("it is loading")
    cards = await _cards(upstream, known if known and worker.model in known.names else None)
    figures = None
    if report.waiting is not None and report.decodes is not None:
        states = None if pages is None else (pages.free, pages.evictable, pages.owned, pages.protected)
        figures = Figures(report.waiting, report.prefill_tokens, report.decodes, states, report.age_s or 0.0)
    events = None
    if told is not None:
        replay = None if told.replay is None else _reachable(told.replay, upstream.url)
        events = EventsAt(_reachable(told.endpoint, upstream.url), replay, told.snapshot)
    return Heard(
        Kind.HOTPREFIX, _root(cards) or worker.model, _names(cards) or (worker.model,), cards,
        report.incarnation, figures, worker.page_size, worker.total_pages, worker.max_batched_tokens,
        worker.max_running, worker.kv_token_bytes, worker.role, worker.cost, worker.capacity, events,
        report.resume, worker.fingerprint,
    )  # fmt: skip


async def _vllm(upstream: Upstream, known: Heard | None) -> Heard:
    found = read_metrics((await _get(upstream, "/metrics")).decode(errors="replace"))
    if found is None:
        raise _NotThere("/metrics has no vllm:num_requests_running")
    same = known is not None and known.incarnation == found.incarnation
    cards = await _cards(upstream, known if same else None)
    return Heard(
        Kind.VLLM, _root(cards), _names(cards), cards, found.incarnation, found.figures, found.page_size,
        found.total_pages,
    )  # fmt: skip


async def _openai(upstream: Upstream, known: Heard | None) -> Heard:
    cards = await _cards(upstream, None)
    return Heard(Kind.OPENAI, _root(cards), _names(cards), cards)


_ASK = {Kind.HOTPREFIX: _hotprefix, Kind.VLLM: _vllm, Kind.OPENAI: _openai}


async def _cards(upstream: Upstream, known: Heard | None) -> tuple[dict[str, Any], ...]:
    """The model cards: those that are known, or as the worker says. Raises NoAnswer."""
    if known is not None:
        return known.cards
    try:
        data = from_json(await _get(upstream, "/v1/models"))["data"][:MOST_CARDS]
        cards = tuple(card for card in data if isinstance(card["id"], str))
    except (ValueError, KeyError, TypeError) as error:
        raise NoAnswer(f"/v1/models is no list of models ({shortened(str(error))})") from None
    if not cards:
        raise NoAnswer("/v1/models names no model")
    return cards


def _names(cards: tuple[dict[str, Any], ...]) -> tuple[str, ...]:
    return tuple(card["id"] for card in cards)


def _root(cards: tuple[dict[str, Any], ...]) -> str:
    """The model behind the names: the root of the card that is no adapter."""
    base = next((card for card in cards if not card.get("parent")), cards[0])
    root = base.get("root")
    return root if isinstance(root, str) and root else str(base["id"])


def _reachable(endpoint: str, url: str) -> str:
    """An address as it was bound, as others reach it: every address of a machine is that of the worker."""
    host = urlsplit(url).hostname or ""
    host = f"[{host}]" if ":" in host else host
    return re.sub(r"^tcp://(\*|0\.0\.0\.0|\[::\]|::)(?=:\d)", f"tcp://{host}", endpoint)


async def _get(upstream: Upstream, path: str) -> bytes:
    """Raises NoAnswer, and _NotThere if there is no such route."""
    try:
        async with upstream.request("GET", path) as answer:
            if answer.status in (404, 405, 501):
                raise _NotThere(f"{path} is not there ({answer.status})")
            if answer.status != 200:
                raise NoAnswer(f"{path} answers {answer.status}")
            body = bytearray()
            async for part in answer.content.iter_any():
                body += part
                if len(body) > MOST_BYTES:
                    raise NoAnswer(f"{path} has more than {MOST_BYTES} bytes")
            return bytes(body)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise NoAnswer(reason(error)) from None


def reason(error: BaseException) -> str:
    """What went wrong with a connection, in one short line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
