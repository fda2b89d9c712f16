"""From a URL to a store. Owns: `open_store`.

Rules: opening contacts nothing and creates no file. A store that is absent now may be there later; until then
every look-up in it is a miss. A fault of the URL itself is a ConfigError at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import cast
from urllib.parse import urlsplit

from hotprefix.engine.stores.base import Store
from hotprefix.errors import ConfigError

_STORES = {  # scheme: (module, class, the extra that installs what it needs)
    "file": ("file", "FileStore", "engine"),
    "valkey": ("valkey", "ValkeyStore", "valkey"),
    "redis": ("valkey", "ValkeyStore", "valkey"),
    "s3": ("s3", "S3Store", "s3"),
}


def open_store(url: str) -> Store:
    """The store at `url`: file:///path, valkey://host:port/db or s3://bucket/prefix, with the options
    that docs/stores.md lists. Raises ConfigError."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"the store's URL is malformed: {error}", param="l3") from error
    if parts.scheme not in _STORES:
        raise ConfigError(
            f"store scheme {parts.scheme!r} is unknown: use one of {', '.join(_STORES)}, as in "
            f"file:///var/cache/hotprefix?quota=10GB",
            param="l3",
        )
    module, name, extra = _STORES[parts.scheme]
    try:
        store = getattr(import_module(f"hotprefix.engine.stores.{module}"), name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{parts.scheme}:// stores need the package {error.name!r}: pip install 'hotprefix[{extra}]'",
            param="l3",
        ) from error
    return cast(Store, store.from_url(parts))
