"""Debian's Chromium without a window, led through Debian's driver; nothing leaves this machine."""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WAIT_S = 40.0
"""Patience with a machine that has other things to do."""


def missing() -> str:
    """Why there is no browser here; empty if there is one."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed"
    for name in ("chromium", "chromedriver"):
        if shutil.which(name) is None:
            return f"{name} is not installed (Debian: apt-get install chromium chromium-driver)"
    return ""


class Browser:
    """One browser, for any number of pages one after another.

    Args:
        driver: from selenium.
    """

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """Takes on a screen of so many CSS pixels, whose reader may prefer dark pages."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1.0, "mobile": False}
        self._cdp("Emulation.setDeviceMetricsOverride", screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._cdp("Emulation.setEmulatedMedia", {"features": [scheme]})

    def _cdp(self, command: str, values: dict[str, Any]) -> Any:
        return self._driver.execute_cdp_cmd(command, values)

    def open(self, url: str) -> None:
        self.errors()
        self._driver.get(url)
        self.wait("document.readyState === 'complete'")

    def run(self, code: str, *values: Any) -> Any:
        """What an expression of JavaScript gives."""
        return self._driver.execute_script(f"return {code};", *values)

    def wait(self, code: str) -> None:
        """Waits until an expression is true, also of a page that loads itself again."""
        from selenium.common.exceptions import WebDriverException

        end = time.monotonic() + WAIT_S
        while True:
            with contextlib.suppress(WebDriverException):  # between two pages
                if self.run(code):
                    return
            assert time.monotonic() < end, f"not within {WAIT_S} s: {code}"
            time.sleep(0.05)

    def errors(self) -> list[str]:
        """What the console has complained about since the last call."""
        log = self._driver.get_log("browser")
        return [entry["message"] for entry in log if entry["level"] in ("SEVERE", "WARNING")]

    def picture(self, path: Path, *, of: str) -> None:
        """Writes a picture of a whole element, wherever it is."""
        box = self.run(
            "(r => ({x: r.x + scrollX, y: r.y + scrollY, width: r.width, height: r.height}))"
            "(document.querySelector(arguments[0]).getBoundingClientRect())",
            of,
        )
        values: dict[str, Any] = {"format": "png", "captureBeyondViewport": True}
        values["clip"] = {**box, "scale": 1}
        path.write_bytes(base64.b64decode(self._cdp("Page.captureScreenshot", values)["data"]))

    def printed(self) -> bytes:
        """The page as a PDF."""
        return base64.b64decode(self._cdp("Page.printToPDF", {})["data"])


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A browser of its own, closed in the end."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for word in ("headless=new", "disable-dev-shm-usage", "hide-scrollbars", "no-first-run"):
            options.add_argument(f"--{word}")
        options.add_argument(f"--user-data-dir={profile}")
        if os.geteuid() == 0:  # its sandbox refuses root
            options.add_argument("--no-sandbox")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = Service(shutil.which("chromedriver") or "chromedriver")
        driver = webdriver.Chrome(options=options, service=service)
        try:
            yield Browser(driver)
        finally:
            driver.quit()
