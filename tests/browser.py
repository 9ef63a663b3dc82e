"""A real browser, headless: Chromium, told what to do over its debugging pipe.

Messages of the DevTools protocol are JSON with a zero byte after each; Chromium reads them from
descriptor 3 and writes to descriptor 4.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
ANSWER_S, CHANGE_S = 30.0, 10
_FLAGS = (
    "--headless=new", "--remote-debugging-pipe", "--disable-gpu", "--disable-dev-shm-usage",
    "--no-first-run", "--disable-extensions", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip


def find_browser() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A browser with one page after the other."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._numbers = itertools.count(1)
        self._held = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        """What the page has told since it was opened."""

    # ---- the protocol

    def tell(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command; return its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        ends = time.monotonic() + ANSWER_S
        while (answer := self._read(ends)).get("id") != number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self, ends: float) -> dict[str, Any]:
        while b"\0" not in self._held:
            left_s = ends - time.monotonic()
            assert left_s > 0 and select.select([self._reading], [], [], left_s)[0], "no answer"
            data = os.read(self._reading, 1 << 16)
            assert data, "the browser is gone"
            self._held += data
        message, _, self._held = self._held.partition(b"\0")
        return json.loads(message)

    # ---- pages

    def open(self, url: str, *, width: int = 1200, height: int = 900, phone: bool = False) -> None:
        """Open a page of its own size."""
        self.close_page()
        target = self.tell("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.tell("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        self._target = target
        self.events.clear()
        for domain in ("Runtime", "Log", "Network", "Page"):
            self.tell(f"{domain}.enable")
        self.tell(
            "Emulation.setDeviceMetricsOverride", width=width, height=height,
            deviceScaleFactor=2 if phone else 1, mobile=phone,
        )  # fmt: skip
        self.tell("Page.navigate", url=url)

    def close_page(self) -> None:
        if self._session is not None:
            self._session = None
            self.tell("Target.closeTarget", targetId=self._target)

    def run(self, code: str) -> Any:
        """Evaluate JavaScript in the page, a promise to its end; return the value."""
        result = self.tell(
            "Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait for the change of the page that makes JavaScript true in it."""
        seen = self.run(
            "new Promise((done) => {"
            f" const holds = () => {{ try {{ return Boolean({condition}); }} catch {{}} }};"
            " const end = () => { changes.disconnect(); clearTimeout(limit); done(holds()); };"
            " const changes = new MutationObserver(() => { if (holds()) end(); });"
            f" const limit = setTimeout(end, {1000 * CHANGE_S});"
            " changes.observe(document, { subtree: true, childList: true, attributes: true,"
            " characterData: true }); if (holds()) end(); })"
        )
        assert seen, f"{condition!r} has not come to be; the page says {self.text('body')!r}"

    def text(self, selector: str) -> str:
        """What can be read at the first element that a selector finds."""
        return self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    def complaints(self) -> list[str]:
        """Errors of the page's code, and what its policy or the console complained of."""
        found = []
        for event in self.events:
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(json.dumps(event["params"]["exceptionDetails"])[:500])
            if event.get("method") == "Log.entryAdded":
                entry = event["params"]["entry"]
                if entry["level"] in ("error", "warning"):
                    found.append(f"{entry['source']}: {entry['text']}")
        return found

    def asked(self) -> set[str]:
        """Every address that the page has asked for."""
        return {
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        }


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """Run a browser, whose profile is in `folder`, for as long as the context lasts."""
    program = find_browser()
    assert program is not None
    to_read, to_tell = os.pipe()
    to_hear, to_write = os.pipe()
    flags = [*_FLAGS, f"--user-data-dir={folder}"]
    if os.getuid() == 0:
        flags.append("--no-sandbox")  # which refuses to be root's
    command = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
    process = subprocess.Popen(
        ["bash", "-c", command, program, *flags],
        pass_fds=(to_read, to_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"HOME": str(folder)},
    )
    os.close(to_read), os.close(to_write)
    browser = Browser(to_hear, to_tell)
    try:
        browser.tell("Browser.getVersion")  # it is there, and no shell any more
        yield browser
        browser.close_page()
        browser.tell("Browser.close")
        process.wait(ANSWER_S)
    finally:
        process.kill()
        process.wait()
        os.close(to_hear), os.close(to_tell)
