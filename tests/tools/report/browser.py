"""Chromium without a window, driven over a pipe: what a page shows, loads and complains about."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)


def find() -> str | None:
    """The browser on the PATH, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One tab.

    Attributes
    ----------
    complaints : list of str
        Errors and warnings on the console, and uncaught exceptions.
    requested : list of str
        URLs that the page has loaded.
    """

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._rest = write, read, b""
        self._number = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        self.requested: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, path: Path, width: int, height: int = 900) -> None:
        """Load a file into a window of this size, and wait until its figures are drawn."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.call("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + 300
        while not self.value("document.body !== null && document.body.dataset.drawn !== undefined"):
            assert time.monotonic() < deadline, f"figures are not drawn: {self.complaints}"
            time.sleep(0.05)

    def value(self, expression: str) -> Any:
        """Value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol, and take note of events until it answers."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer.get("method"), answer.get("params", {}))

    def _note(self, event: str | None, told: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(told["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(told["args"]))
        elif event == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(json.dumps(told["entry"]))
        elif event == "Network.requestWillBeSent":
            self.requested.append(told["request"]["url"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._read, 1 << 16)
            assert part, "the browser has ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser whose profile is in a folder, ended with the context."""
    name = find()
    assert name
    (command, write), (read, answer) = os.pipe(), os.pipe()
    # The browser reads commands from descriptor 3 and writes answers to descriptor 4.
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (command, answer)]
    nothing = os.open(os.devnull, os.O_RDWR)
    places = {1: nothing, 2: nothing, 3: ends[0], 4: ends[1]}
    process = os.posix_spawn(
        name,
        [name, *FLAGS, f"--user-data-dir={folder}", "--remote-debugging-pipe"],
        {**os.environ, "HOME": str(folder)},
        file_actions=[(os.POSIX_SPAWN_DUP2, end, place) for place, end in places.items()],
        setpgroup=0,
    )
    for end in (command, answer, nothing, *ends):
        os.close(end)
    try:
        yield Browser(write, read)
    finally:
        os.close(write)
        os.close(read)
        os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
