"""Router settings. Owns: `RouterConfig`, frozen and validated when built.

Rules: what a server has, too (address, keys, limits of clients) is `ServerConfig`'s. The admin key is held as
a SHA-256 digest only. Units: seconds, tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from hotprefix.errors import ConfigError
from hotprefix.fleet.config import FleetConfig, RoutingPolicy
from hotprefix.options import Group, check, option
from hotprefix.router.worker_spec import parse_all
from hotprefix.server.config import ServerConfig, internal_key

WORKERS, ROUTING, FAILURES, OVERLOAD = Group.WORKERS, Group.ROUTING, Group.FAILURES, Group.OVERLOAD
DEFAULT_COST = "llama-3.1-8b.1xh100.fp8"
"""What workers are taken to cost if nothing is known. It is said of each such worker that this is so."""

POLICIES = {
    "round_robin": "the workers by turns",
    "random": "any, with equal chances",
    "least_requests": "the fewest requests, whatever they cost",
    "session": "where the session was answered before",
    "least_load": "the smallest load",
    "affinity": "the most tokens that need not be computed, whatever the load",
    "bounded": "the same among workers that are not much more loaded than others",
    "predicted": "the earliest predicted first token, plus what the choice costs others",
    "plan": "replicas of hot prefixes by their rate (CacheRoute)",
    "equal_tps": "the worker that reuses the fewest tokens a second; only to compare with",
}

SHARED = (
    "host", "port", "drain_s", "key_digests", "isolate_keys", "cors_origin", "allowed_hosts", "body_limit",
    "max_header_bytes", "max_headers", "max_connections", "header_timeout_s", "body_timeout_s",
    "min_body_rate", "idle_timeout_s", "send_timeout_s",
)  # fmt: skip
"""The fields of `ServerConfig` that a router has."""


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Which workers, and how requests go to them; docs/router.md has it as a page. Raises ConfigError."""

    # fmt: off
    workers: tuple[str, ...] = option(
        (), "A worker, URL[,field=value]...; repeatable. Fields: kind, name, role, events, replay, key-file, "
        "client-key, ca, cost. dns+http://NAME:PORT is one for each address.", WORKERS, "WORKER",
        flag="worker", unset="none")
    worker_file: str | None = option(
        None, "File with one worker a line, read again when it changes.", WORKERS, "FILE", unset="none")
    relist_s: float = option(
        5.0, "How often the file is looked at and names are resolved.", WORKERS, "SECONDS", "> 0")
    cost: str = option(
        DEFAULT_COST, "Cost model, a preset or a file, of workers that tell none.", WORKERS, "PRESET")
    # SHA-256 of each admin key; empty = the list of workers cannot be changed over HTTP.
    admin_digests: frozenset[bytes] = option(
        frozenset(), "File with the keys that may change the list of workers.", WORKERS, "FILE",
        flag="admin-key-file", repr=False, read=lambda path: ServerConfig.keys_from_file(path),
        unset="none may")
    internal_key: str | None = option(
        None, "File with the key by which this router shows its engines who it is.", WORKERS, "FILE",
        flag="internal-key-file", repr=False, read=lambda path: internal_key(path),
        unset="internal routes stay closed")

    tokenizers: tuple[str, ...] = option(
        (), "Model whose tokenizer and template read prompts exactly: a Hugging Face directory, .gguf file, "
        "hub id, or `default`; repeatable.", ROUTING, "MODEL", flag="tokenizer",
        unset="texts are compared by pieces")
    policy: str = option(
        RoutingPolicy.PREDICTED.value, "How a worker is chosen.", ROUTING, "POLICY", values=POLICIES)
    page_size: int | None = option(
        None, "Tokens of a page.", ROUTING, "TOKENS", ">= 1", unset="that of the first engine that tells it")
    poll_s: float = option(0.5, "How often each worker is asked for its load.", ROUTING, "SECONDS", "> 0")

    event_log: str | None = option(
        None, "Where to write the event log: FILE.jsonl or FILE.parquet.", Group.OBSERVABILITY, "FILE",
        unset="no log")
    otel: str | None = option(
        None, "Send a span for each request to this OTLP/HTTP collector.", Group.OBSERVABILITY, "URL",
        unset="none")

    connect_timeout_s: float = option(
        2.0, "How long a connection to a worker may take.", FAILURES, "SECONDS", "> 0")
    silence_s: float = option(
        600.0, "How long a worker may send nothing of an answer.", FAILURES, "SECONDS", "> 0",
        flag="silence")
    retries: int = option(
        2, "How often a request goes elsewhere before its answer has begun.", FAILURES, "COUNT", ">= 0")
    migrations: int = option(
        8, "How often an answer that has begun goes on elsewhere if its worker fails.", FAILURES, "COUNT",
        ">= 0")
    probe_timeout_s: float = option(
        2.0, "How long a worker may take to tell its load.", FAILURES, "SECONDS", "> 0")
    probe_failures: int = option(
        3, "Questions without an answer, in a row, after which a worker counts as gone.", FAILURES, "COUNT",
        ">= 1")
    breaker_failures: int = option(
        3, "Failed requests in a row after which a worker gets none for a while.", FAILURES, "COUNT", ">= 1")
    breaker_open_s: float = option(
        5.0, "How long it gets none; then one request tries it.", FAILURES, "SECONDS", "> 0",
        flag="breaker-open")

    bound: int = option(
        256, "Requests that a worker has at a time; more wait here. 0 = no bound.", OVERLOAD, "COUNT", ">= 0",
        flag="worker-requests")
    hold_s: float = option(
        10.0, "How long a request waits here for a worker; then it gets a 429.", OVERLOAD, "SECONDS", ">= 0",
        flag="hold")
    max_held: int = option(
        1024, "Requests that wait here at a time, of one model.", OVERLOAD, "COUNT", ">= 0")
    refuse_above_s: float = option(
        0.0, "Refuse a request at once if its first token would come later everywhere; 0 = never.",
        OVERLOAD, "SECONDS", ">= 0", flag="refuse-above")
    # fmt: on

    def __post_init__(self) -> None:
        check(self)
        parse_all(self.workers)
        if not self.workers and self.worker_file is None and not self.admin_digests:
            raise ConfigError(
                "there is no worker: give --worker URL or --worker-file FILE (or --admin-key-file, and add "
                "workers over HTTP)",
                param="workers",
            )

    def fleet(self, page_size: int) -> FleetConfig:
        """The configuration of a pool's fleet. Requests wait here at most `hold_s`, and are then refused; the
        fleet itself would send them to full workers, so it must never see one that has waited so long."""
        return FleetConfig(
            page_size=page_size,
            policy=RoutingPolicy(self.policy),
            bound=self.bound,
            hold_s=2 * self.hold_s + 1.0,
        )
