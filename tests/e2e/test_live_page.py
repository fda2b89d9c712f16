"""The live page in a real browser: it shows what the server has, updates, and asks nobody else for anything.

Where no Chromium is installed these tests are skipped with a warning; HOTPREFIX_TEST_BROWSER=required (as CI
sets it) makes that a failure.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from tests.support.serving import Server

KEY = "sk-live-page"
PROMPTS = [list(range(1, 60)), list(range(1, 60)), [*range(1, 40), 99, 98, 97], list(range(200, 240))]
BINARIES = [shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")]


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    chromium, driver = BINARIES
    if chromium is None or driver is None:
        reason = "no Chromium here: apt-get install chromium chromium-driver"
        if os.environ.get("HOTPREFIX_TEST_BROWSER") == "required":
            pytest.fail(reason)
        warnings.warn(reason, stacklevel=1)
        pytest.skip(reason)
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    made = webdriver.Chrome(options, webdriver.ChromeService(driver))
    yield made
    made.quit()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    yield from running()


@pytest.fixture(scope="module")
def locked() -> Iterator[Server]:
    yield from running(KEY)


def running(*arguments: str) -> Iterator[Server]:
    made = Server([sys.executable, "-m", "tests.support.live", *arguments])
    try:
        made.until_ready()
        yield made
    finally:
        made.process.kill()
        made.wait()


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


def until(browser: webdriver.Chrome, condition: Callable[[], Any]) -> Any:
    return WebDriverWait(browser, 60, poll_frequency=0.05).until(lambda _: condition())


def text(browser: webdriver.Chrome, name: str) -> str:
    return str(browser.execute_script("return document.getElementById(arguments[0]).textContent", name))


def label(browser: webdriver.Chrome, name: str) -> str:
    return str(browser.find_element(By.ID, name).get_attribute("aria-label"))


def at_size(browser: webdriver.Chrome, width: int, height: int, scheme: str = "light") -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def complaints(browser: webdriver.Chrome) -> list[str]:
    """What the browser's console has said, refusals of the key left out."""
    return [e["message"] for e in browser.get_log("browser") if "401" not in e["message"]]


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
    asked = "return performance.getEntriesByName(new URL('live.json', location).href).length"
    count = browser.execute_script(asked)
    browser.execute_async_script("setTimeout(arguments[0], 2500)")
    assert browser.execute_script(asked) == count
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
    browser.get_log("performance")
    browser.get(f"{server.url}/")
    until(browser, lambda: text(browser, "state") == "ready")
    entries = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {e["params"]["request"]["url"] for e in entries if e["method"] == "Network.requestWillBeSent"}
    assert {url for url in asked if not url.startswith(("data:", "chrome"))} == {
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
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    for name in ("svg", "button", ".card"):
        for node in browser.find_elements(By.CSS_SELECTOR, name):
            box = node.rect
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= width + 1
    assert all(
        svg.get_attribute("aria-label") for svg in browser.find_elements(By.CSS_SELECTOR, "svg[role=img]")
    )
    pairs = browser.execute_script(CONTRAST)
    assert pairs
    assert min(pairs.values()) >= 4.5, pairs
    shots = Path(os.environ.get("HOTPREFIX_SCREENSHOTS") or tmp_path)
    assert browser.save_screenshot(str(shots / f"live-{width}-{scheme}.png"))
    assert complaints(browser) == []


# Contrast of each kind of text against its card or page (WCAG), by computed colours.
CONTRAST = """
const light = rgb => {
  const line = v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const [r, g, b] = rgb.match(/[\\d.]+/g).map(v => line(v / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const back = node => {
  for (; node; node = node.parentElement) {
    const colour = getComputedStyle(node).backgroundColor;
    if (!colour.startsWith('rgba(0, 0, 0, 0')) return colour;
  }
  return 'rgb(255, 255, 255)';
};
const kinds = 'h1,h2,#state,.big,.big small,.key span,dt,dd,.soft,#pause,summary';
const found = {};
for (const kind of kinds.split(','))
  for (const node of document.querySelectorAll(kind)) {
    if (!node.offsetParent) continue;
    const [a, b] = [light(getComputedStyle(node).color), light(back(node))];
    found[kind] = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  }
return found;
"""


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
