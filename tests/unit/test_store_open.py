"""Store URLs: a fault of a URL is reported at once, nothing is contacted, and no secret is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotprefix.engine.stores.file import FileStore
from hotprefix.engine.stores.open_store import open_store
from hotprefix.engine.stores.s3 import S3Store
from hotprefix.engine.stores.url import parse_bytes
from hotprefix.engine.stores.valkey import ValkeyStore
from hotprefix.errors import ConfigError


def test_each_scheme_opens_its_store_and_contacts_nothing(tmp_path: Path) -> None:
    for url, kind in {
        f"file://{tmp_path}/absent?quota=2GiB": FileStore,
        "valkey://user:secret@127.0.0.1:1/3?tls=1&timeout=0.5": ValkeyStore,
        "redis://127.0.0.1:1": ValkeyStore,
        "s3://bucket/some/prefix?endpoint=http://127.0.0.1:1&region=eu-central-1": S3Store,
    }.items():
        store = open_store(url)
        assert isinstance(store, kind)
        assert "secret" not in store.describe()
        store.close()
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "scheme '' is unknown"),
        ("/var/cache", "as in file:///"),
        ("ftp://host/x", "scheme 'ftp' is unknown"),
        ("valkey://[bad", "malformed"),
        ("file://host/path", "no absolute path"),
        ("file:///", "no absolute path"),
        ("file:///x?quota=ten", "quota='ten' is no size"),
        ("file:///x?quota=1KB", "too small"),
        ("file:///x?qouta=1GB", r"unknown or doubled options \['qouta'\].*known are \['quota'\]"),
        ("file:///x?quota=1GB&quota=2GB", "doubled"),
        ("file:///x?quota", "malformed"),
        ("valkey://", "write valkey://host:port"),
        ("valkey://host:99999", "write valkey://host:port"),
        ("valkey://host/db", "database-number"),
        ("valkey://host?timeout=0", "timeout='0'"),
        ("valkey://host?timeout=soon", "timeout='soon'"),
        ("valkey://host?tls=maybe", "tls='maybe'"),
        ("valkey://host?ca=/x", "add tls=1"),
        ("valkey://host?tls=1&ca=/no/such/file", "ca='/no/such/file'.* is no file"),
        ("valkey://host?password_file=/no/such/file", "password_file='/no/such/file' cannot be read"),
        ("s3:///prefix", "write s3://bucket"),
        ("s3://key:secret@bucket", "credentials come from"),
    ],
)
def test_a_bad_url_says_what_is_wrong(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        open_store(url)
    assert "secret" not in str(caught.value)


def test_passwords_stay_out_of_messages() -> None:
    with pytest.raises(ConfigError) as caught:
        open_store("valkey://user:hunter2@host/db?tls=1")
    assert "hunter2" not in str(caught.value)


def test_sizes() -> None:
    assert parse_bytes("10GB", "q") == 10 * 10**9
    assert parse_bytes("1.5 MiB", "q") == 3 * 2**19
    assert parse_bytes("4096", "q") == 4096
    for bad in ("", "-1GB", "GB", "1PB", "1e9", "nan"):
        with pytest.raises(ConfigError):
            parse_bytes(bad, "q")
