"""A worker as it is named. Owns: `WorkerSpec` and its text, `URL[,field=value]...`.

Rules: a text that is wrong is refused with the wrong part and the fix, before anything is contacted. A key is
read from its file and never shown.

    http://10.0.0.5:8000
    https://10.0.0.6:8000,role=decode,key-file=/etc/worker-key,ca=/etc/ca.pem
    http://10.0.0.7:8000,kind=vllm,events=tcp://10.0.0.7:5557,name=big
    dns+http://engines.default.svc:8000
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from hotprefix.errors import ConfigError
from hotprefix.fleet.profile import Role
from hotprefix.options import require_one_of

FIELDS = ("kind", "role", "name", "events", "replay", "key-file", "client-key", "ca", "cost")
SCHEMES = ("http", "https", "dns+http", "dns+https")
NAME = re.compile(r"[A-Za-z0-9._:\[\]-]{1,100}")
EVENTS = re.compile(r"(tcp|ipc|inproc)://\S+")


class Kind(StrEnum):
    """What a worker is, and so how it is asked. AUTO: found out at the first contact."""

    AUTO = "auto"
    HOTPREFIX = "hotprefix"
    VLLM = "vllm"
    OPENAI = "openai"


class ClientKey(StrEnum):
    """What becomes of the key that a client sends. DROP: it goes no further. PASS: this worker gets it."""

    DROP = "drop"
    PASS = "pass"


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker, or with `dns` one for each address of the host.

    url: without a slash at its end. events, replay: where its KV events are published; None = as it says
    itself. key: what it is sent as its API key. ca: file of the authority that signed its certificate.
    cost: preset or file; None = as it says itself, or the router's default.
    """

    url: str
    name: str
    kind: Kind = Kind.AUTO
    role: Role = Role.BOTH
    events: str | None = None
    replay: str | None = None
    key: str | None = field(default=None, repr=False)
    client_key: ClientKey = ClientKey.DROP
    ca: str | None = None
    cost: str | None = None
    dns: bool = False

    def at(self, address: str) -> WorkerSpec:
        """The worker that this one's name stands for at one address, `HOST` or `[HOST]`."""
        parts = urlsplit(self.url)
        place = f"{address}:{parts.port}" if parts.port else address
        return replace(self, url=f"{parts.scheme}://{place}{parts.path}", name=place, dns=False)

    def without_cost(self) -> WorkerSpec:
        """The same without a cost model of its own."""
        return replace(self, cost=None)


def parse(text: str) -> WorkerSpec:
    """Raises ConfigError."""
    url, *given = [part.strip() for part in text.split(",")]
    fields: dict[str, str] = {}
    for part in given:
        name, is_, value = part.partition("=")
        require_one_of(f"worker {url}: field", name, name, FIELDS)
        if not is_ or not value:
            raise _wrong(text, f"{name} has no value: give {name}=VALUE")
        if name in fields:
            raise _wrong(text, f"{name} is given twice: give it once")
        fields[name] = value
    scheme, place = _checked_url(text, url)
    for name, kind in (("kind", Kind), ("role", Role), ("client-key", ClientKey)):
        if name in fields:
            require_one_of(f"worker {url}: {name}", fields[name], fields[name], list(kind))
    for name in ("events", "replay"):
        if name in fields and not EVENTS.fullmatch(fields[name]):
            raise _wrong(text, f"{name}={fields[name]} is no address: give {name}=tcp://HOST:PORT")
    name = fields.get("name", place)
    if not NAME.fullmatch(name):
        raise _wrong(text, f"name={name!r}: give letters, digits, dots, colons and hyphens, at most 100")
    ca = fields.get("ca")
    if ca is not None and not Path(ca).is_file():
        raise _wrong(text, f"ca={ca}: there is no such file")
    return WorkerSpec(
        url.removeprefix("dns+").rstrip("/"), name, Kind(fields.get("kind", Kind.AUTO)),
        Role(fields.get("role", Role.BOTH)), fields.get("events"), fields.get("replay"),
        _key(text, fields.get("key-file")), ClientKey(fields.get("client-key", ClientKey.DROP)), ca,
        fields.get("cost"), scheme.startswith("dns+"),
    )  # fmt: skip


def parse_all(texts: Iterable[str]) -> tuple[WorkerSpec, ...]:
    """Raises ConfigError, also if two have the same name."""
    specs: dict[str, WorkerSpec] = {}
    for spec in map(parse, texts):
        if spec.name in specs:
            raise ConfigError(
                f"two workers are named {spec.name!r}: give one of them another URL, or a name=...",
                param="workers",
            )
        specs[spec.name] = spec
    return tuple(specs.values())


def parse_lines(text: str, where: str) -> tuple[WorkerSpec, ...]:
    """The workers of a file: one a line; empty lines and lines that start with # are left out. Raises
    ConfigError, which names the line."""
    found: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.strip().startswith("#"):
            continue
        try:
            parse(line)
            found.append(line)
            parse_all(found)
        except ConfigError as error:
            raise ConfigError(f"{where}, line {number}: {error}", param="worker_file") from None
    return parse_all(found)


def _checked_url(text: str, url: str) -> tuple[str, str]:
    """The scheme, and host with port."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise _wrong(text, f"{url!r} is no URL ({error}): give http://HOST:PORT") from None
    if parts.scheme not in SCHEMES or not host:
        raise _wrong(text, f"{url!r} is no URL: give http://HOST:PORT or https://HOST:PORT")
    if parts.username or parts.password or parts.query or parts.fragment or re.search(r"\s", url):
        raise _wrong(text, "give a URL of scheme, host, port and path only; a key goes into key-file=FILE")
    if re.search(r"/v1/?$", parts.path):
        raise _wrong(text, f"give {url[: url.rindex('/v1')]} without /v1, which is part of each route")
    host = f"[{host}]" if ":" in host else host
    return parts.scheme, (f"{host}:{port}" if port else host) + parts.path.rstrip("/").replace("/", ":")


def _key(text: str, path: str | None) -> str | None:
    if path is None:
        return None
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise _wrong(text, f"key-file={path}: {error}") from error
    if not re.fullmatch(r"[\x21-\x7e]+", key):
        raise _wrong(text, f"key-file={path} holds no key: give one line of visible ASCII characters")
    return key


def _wrong(text: str, message: str) -> ConfigError:
    return ConfigError(f"worker {text!r}: {message}", param="workers")
