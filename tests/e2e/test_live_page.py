"""The live page in a real browser: it shows what the server has, and asks nobody else for anything."""

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
from tests.support.serving import Server

KEY = "sk-live-page"
PROMPTS = [list(range(1, 60)), list(range(1, 60)), [*range(1, 40), 99, 98, 97], list(range(200, 240))]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    yield from running("live")


@pytest.fixture(scope="module")
def locked() -> Iterator[Server]:
    yield from running("live", KEY)


def generate(server: Server, prompt: list[int], key: str = "") -> None:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = {"model": "fake", "prompt": prompt, "max_tokens": 4}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=100)
    assert answer.status_code == 200, answer.text


def fresh(server: Server) -> Any:
    """The page's data once they are not from before the last step; else None."""
    steps = httpx.get(f"{server.url}/server_info").json()["stats"]["steps"]
    data = httpx.get(f"{server.url}/live.json").json()
    return data if data["steps"] == steps else None


def test_the_page_shows_what_the_server_says_and_updates(browser: webdriver.Chrome, server: Server) -> None:
    at_size(browser, 1200, 900)
    browser.get(f"{server.url}/")
    until(browser, lambda: text(browser, "state") == "ready")
    assert text(browser, "model") == "fake"
    assert "computed 0" in label(browser, "sources")
    assert browser.find_element(By.ID, "heat-none").is_displayed()
    for prompt in PROMPTS:
        generate(server, prompt)
    data = until(browser, lambda: fresh(server))
    assert data["sources"]["L1"] > 0
    until(browser, lambda: f"computed {data['sources']['computed']}" in label(browser, "sources"))
    assert f"L1 {data['sources']['L1']}" in label(browser, "sources")
    tiers = browser.find_elements(By.CSS_SELECTOR, "#tiers svg")
    assert [svg.get_attribute("aria-label").split(":")[0] for svg in tiers] == [
        "L1 device pages", "L2 host pages",
    ]  # fmt: skip
    for svg, tier in zip(tiers, data["tiers"], strict=True):
        assert f"evictable {tier['evictable']}" in svg.get_attribute("aria-label")
    assert f"evicted pages{data['evicted']}" in text(browser, "loss")
    assert "3 requests" in label(browser, "heat")
    rows = browser.execute_script(
        "return [...document.querySelectorAll('#heat-rows td')].map(n => n.textContent)"
    )
    assert rows == [v for h in data["hottest"] for v in (h["name"], f"{h['start']} to {h['stop']}",
                                                         str(h["requests"]))]  # fmt: skip
    assert len(browser.find_elements(By.CSS_SELECTOR, "#heat rect")) == len(data["hottest"]) == 2
    assert complaints(browser) == []


def test_it_pauses_and_tells_when_the_server_is_gone(browser: webdriver.Chrome, server: Server) -> None:
    browser.get(f"{server.url}/")
    until(browser, lambda: text(browser, "state") == "ready")
    pause = browser.find_element(By.ID, "pause")
    pause.click()
    assert (pause.text, pause.get_attribute("aria-pressed")) == ("Resume", "true")
    before = label(browser, "sources")
    generate(server, list(range(100, 140)))
    polls = "return performance.getEntriesByName(new URL('live.json', location).href).length"
    count = browser.execute_script(polls)
    browser.execute_async_script("setTimeout(arguments[0], 2500)")
    assert browser.execute_script(polls) == count
    assert label(browser, "sources") == before
    pause.click()
    until(browser, lambda: label(browser, "sources") != before)
    browser.execute_cdp_cmd("Network.enable", {})
    offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    browser.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    until(browser, lambda: "no answer from the server" in text(browser, "state"))
    browser.execute_cdp_cmd("Network.emulateNetworkConditions", {**offline, "offline": False, "latency": 0,
                            "downloadThroughput": -1, "uploadThroughput": -1})  # fmt: skip
    until(browser, lambda: text(browser, "state") == "ready")
    browser.get_log("browser")


def test_nothing_but_the_server_is_asked(browser: webdriver.Chrome, server: Server) -> None:
    asked(browser)
    browser.get(f"{server.url}/")
    until(browser, lambda: text(browser, "state") == "ready")
    assert asked(browser) == {
        f"{server.url}/", f"{server.url}/live.json",
    }  # fmt: skip


@pytest.mark.parametrize("width", [320, 390, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_and_is_readable(
    browser: webdriver.Chrome, server: Server, width: int, scheme: str, tmp_path: Path
) -> None:
    at_size(browser, width, 844, scheme)
    browser.get(f"{server.url}/")
    until(browser, lambda: text(browser, "state") == "ready")
    fits_and_is_readable(browser, width)
    shots = Path(os.environ.get("HOTPREFIX_SCREENSHOTS") or tmp_path)
    assert browser.save_screenshot(str(shots / f"live-{width}-{scheme}.png"))
    assert complaints(browser) == []


def test_a_key_is_asked_for_and_kept_in_the_tab(browser: webdriver.Chrome, locked: Server) -> None:
    at_size(browser, 390, 844)
    browser.get(f"{locked.url}/")
    until(browser, lambda: text(browser, "state") == "locked")
    assert not browser.find_element(By.ID, "cards").is_displayed()
    field = browser.find_element(By.ID, "key")
    for given, said in (("wrong", "the key is not known here"), (KEY, "ready")):
        field.send_keys(given)
        field.submit()
        until(browser, lambda said=said: text(browser, "state") == said)
    assert not browser.find_element(By.ID, "login").is_displayed()
    assert browser.find_element(By.ID, "cards").is_displayed()
    browser.refresh()
    until(browser, lambda: text(browser, "state") == "ready")
    assert KEY not in browser.current_url
    assert browser.execute_script("return localStorage.length") == 0
    browser.execute_script("sessionStorage.clear()")
    assert complaints(browser) == []
