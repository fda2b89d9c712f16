"""A real browser for tests of pages. Owns: the fixture `browser`, and what tests ask of it.

Rules: where no Chromium is installed tests are skipped with a warning; HOTPREFIX_TEST_BROWSER=required (as CI
sets it) makes that a failure.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from tests.support.serving import Server

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


def running(module: str, *arguments: str) -> Iterator[Server]:
    """The main of a module of the tests, as a server of its own."""
    made = Server([sys.executable, "-m", f"tests.support.{module}", *arguments])
    try:
        made.until_ready()
        yield made
    finally:
        made.process.kill()
        made.wait()


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


def asked(browser: webdriver.Chrome) -> set[str]:
    """The addresses that the browser has asked since the last call."""
    entries = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {e["params"]["request"]["url"] for e in entries if e["method"] == "Network.requestWillBeSent"}
    return {url for url in asked if not url.startswith(("data:", "chrome"))}


def fits_and_is_readable(browser: webdriver.Chrome, width: int) -> None:
    """The page at hand is no wider than the window, and all its text has enough contrast."""
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    for name in ("svg:not(.scroll svg)", "button", ".card"):
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
const kinds = 'h1,h2,#state,.big,.big small,.key span,dt,dd,.soft,#pause,summary,th,td,td.mark';
const found = {};
for (const kind of kinds.split(','))
  for (const node of document.querySelectorAll(kind)) {
    if (!node.offsetParent) continue;
    const [a, b] = [light(getComputedStyle(node).color), light(back(node))];
    found[kind] = Math.min(found[kind] ?? 21, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
  }
return found;
"""
