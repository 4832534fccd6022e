"""Headless Chromium through chromedriver's HTTP interface (W3C WebDriver), with the standard library alone."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
KEYS = {"Tab": "\ue004", "Enter": "\ue007", "Space": " ", "Down": "\ue015"}


def missing() -> str | None:
    """Why no browser can be driven here; None if one can."""
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"{program} isn't installed: run requirements/chromium.sh"
    return None


class Browser:
    """A browser of its own profile; ``close`` ends it.

    Args:
        folder: where the profile goes.
    """

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if port := re.search(r"started successfully on port (\d+)", line):
                break
        else:
            raise RuntimeError("chromedriver didn't start")
        self._base = f"http://127.0.0.1:{port[1]}"
        options = {"args": [*FLAGS, f"--user-data-dir={folder}", "about:blank"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        try:
            self._session = (
                "/session/" + self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
            )
        except BaseException:
            self._stop()
            raise

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        # No proxy of the environment stands between this process and its own chromedriver.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=120) as answer:
            return json.load(answer)["value"]

    def open(self, page: Path) -> None:
        """Opens a file."""
        self._call("POST", f"{self._session}/url", {"url": page.resolve().as_uri()})

    def run(self, script: str) -> Any:
        """What the JavaScript function body returns."""
        return self._call("POST", f"{self._session}/execute/sync", {"script": script, "args": []})

    def until(self, condition: str, seconds: float = 60.0) -> None:
        """Waits until the JavaScript expression is true; raises TimeoutError."""
        end = time.monotonic() + seconds
        while not self.run(f"return Boolean({condition})"):
            if time.monotonic() > end:
                raise TimeoutError(f"still not true after {seconds:g} s: {condition}")
            time.sleep(0.05)

    def command(self, name: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol."""
        return self._call("POST", f"{self._session}/goog/cdp/execute", {"cmd": name, "params": parameters})

    def size(self, width: int, height: int) -> None:
        """Sets the size of the page's viewport."""
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    def press(self, *keys: str) -> None:
        """Presses and releases each key."""
        actions = [{"type": kind, "value": KEYS[key]} for key in keys for kind in ("keyDown", "keyUp")]
        self._call("POST", f"{self._session}/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def log(self, kind: str) -> list[dict[str, Any]]:
        """What was logged since the last call: ``browser`` (the console) or ``performance`` (DevTools events)."""
        return self._call("POST", f"{self._session}/se/log", {"type": kind})

    def requests(self) -> list[str]:
        """Addresses that pages asked for since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        return [one["params"]["request"]["url"] for one in events if one["method"] == "Network.requestWillBeSent"]

    def dark(self, on: bool) -> None:
        """Tells pages whether the reader prefers dark colours."""
        value = "dark" if on else "light"
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def picture(self, to: Path, whole: bool = True) -> None:
        """Writes a PNG of the page, or of what is in view."""
        taken = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))
        to.write_bytes(base64.b64decode(taken["data"]))

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        width, height = self.run("return [innerWidth, document.documentElement.scrollHeight]")
        return {"clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}}

    def close(self) -> None:
        """Ends the browser and its driver."""
        try:
            self._call("DELETE", self._session)
        finally:
            self._stop()

    def _stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        if self._process.stdout is not None:
            self._process.stdout.close()
