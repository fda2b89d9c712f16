"""The router's live page in a real browser: it shows what the router says, whatever its workers call
themselves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By

from tests.support.browser import (
    asked,
    at_size,
    complaints,
    fits_and_is_readable,
    label,
    running,
    text,
    until,
)
from tests.support.live_router import EVIL
from tests.support.serving import Server

KEY = "sk-router-page"
PROMPT = "A secret that no page may show. " * 20


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A router that has answered six requests, one of them after a failure."""
    for made in running("live_router"):
        for number in range(6):
            body = {"model": EVIL, "prompt": PROMPT + str(number), "stream": True, "max_tokens": 3}
            assert httpx.post(f"{made.url}/v1/completions", json=body, timeout=60).status_code == 200
        yield made


@pytest.fixture(scope="module")
def locked() -> Iterator[Server]:
    yield from running("live_router", KEY)


def opened(browser: webdriver.Chrome, server: Server) -> None:
    browser.get(f"{server.url}/")
    until(browser, lambda: text(browser, "state") == "ready")
    until(browser, lambda: "7 requests" in label(browser, "heat"))


def cells(browser: webdriver.Chrome, name: str) -> list[list[str]]:
    """The texts of a table's rows."""
    rows = "[...document.getElementById(arguments[0]).rows]"
    found = browser.execute_script(f"return {rows}.map(r => [...r.cells].map(c => c.textContent))", name)
    assert isinstance(found, list)
    return found


def test_it_shows_workers_decisions_prefixes_and_failures(browser: webdriver.Chrome, server: Server) -> None:
    at_size(browser, 1200, 900)
    opened(browser, server)
    data: Any = httpx.get(f"{server.url}/live.json").json()
    (pool,) = data["pools"]
    workers = {row[0]: row for row in cells(browser, "workers")}
    assert set(workers) == {"w0", "bad", EVIL, "gone"}
    assert (workers["w0"][1], workers["w0"][2]) == ("ready", "closed")
    assert workers["bad"][2] == "open"
    assert workers["bad"][11] == "5xx 1"
    assert workers["gone"][1].startswith("unknown: ")
    bars = browser.find_elements(By.CSS_SELECTOR, "#workers svg.bars")
    assert bars[0].get_attribute("aria-label").startswith("prefill 0, decode 0, pages 0")

    decisions = cells(browser, "recent")
    assert len(decisions) == len(pool["recent"]) == 7
    for row, found in zip(decisions, pool["recent"], strict=True):
        assert [row[i] for i in (0, 2, 3, 4, 9)] == [
            found["request"], found["worker"], found["rule"].replace("_", " "), str(found["prompt"]),
            found["ended"],
        ]  # fmt: skip
        assert (row[8] == "–") == (found["first_s"] is None) == (found["ended"] == "failed")
    assert cells(browser, "errors")[0][:2] == [EVIL, "6"]

    (hot,) = pool["hottest"]
    ((name, tokens, requests, holders),) = cells(browser, "heat-rows")
    assert (name, tokens, requests) == (hot["name"], f"0 to {hot['stop']}", "7")
    assert hot["holders"] == {"w0": "presumed", EVIL: "presumed"}
    assert sorted(holders.split(", ")) == sorted(["w0 presumed", f"{EVIL} presumed"])

    assert "retries1" in text(browser, "failures")
    assert "turn7" in text(browser, "rules")
    assert f"by rule{pool['copied_tokens']['by_rule']}" in text(browser, "copies").replace(",", "")
    assert "in flight" in label(browser, "sources")
    assert "secret" not in httpx.get(f"{server.url}/live.json").text
    assert complaints(browser) == []


def test_what_workers_say_is_text(browser: webdriver.Chrome, server: Server) -> None:
    opened(browser, server)
    assert EVIL in text(browser, "workers")
    assert browser.find_elements(By.CSS_SELECTOR, "img") == []
    assert browser.title == "hotprefix live"


def test_nothing_but_the_router_is_asked(browser: webdriver.Chrome, server: Server) -> None:
    asked(browser)
    opened(browser, server)
    assert asked(browser) == {f"{server.url}/", f"{server.url}/live.json"}


@pytest.mark.parametrize("width", [320, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_and_is_readable(
    browser: webdriver.Chrome, server: Server, width: int, scheme: str, tmp_path: Path
) -> None:
    at_size(browser, width, 844, scheme)
    opened(browser, server)
    fits_and_is_readable(browser, width)
    shots = Path(os.environ.get("HOTPREFIX_SCREENSHOTS") or tmp_path)
    assert browser.save_screenshot(str(shots / f"router-{width}-{scheme}.png"))
    assert complaints(browser) == []


def test_its_data_need_a_key(browser: webdriver.Chrome, locked: Server) -> None:
    at_size(browser, 390, 844)
    assert httpx.get(f"{locked.url}/live.json").status_code == 401
    browser.get(f"{locked.url}/")
    until(browser, lambda: text(browser, "state") == "locked")
    field = browser.find_element(By.ID, "key")
    field.send_keys(KEY)
    field.submit()
    until(browser, lambda: text(browser, "state") == "ready")
    assert browser.find_element(By.ID, "cards").is_displayed()
    browser.execute_script("sessionStorage.clear()")
