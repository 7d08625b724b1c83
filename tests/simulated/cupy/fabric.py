"""What the devices of all ranks share: they run side by side, and meet in NCCL."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulated.cupy.module import SimulatedCupy

PATIENCE = 300.0  # s without progress, after which a test is told that it hangs

BUSY: set[str] = set()
"""What some thread does on the host that takes long: who waits for it meanwhile does not hang."""

Key = tuple[int, ...]


class Fabric:
    """The machine: devices of ranks that are threads of one process.

    Parameters
    ----------
    gpus : int
        How many each rank sees.
    """

    def __init__(self, gpus: int = 8) -> None:
        self.gpus = gpus
        self.lock = threading.RLock()
        self.devices: list[SimulatedCupy] = []  # they go on when their ranks have ended
        self.groups = 0
        self._meetings: dict[Key, dict[int, Any]] = {}
        self._taken: dict[Key, int] = {}

    def run(self, first: SimulatedCupy) -> bool:
        """Let a device do one piece of work, or any other, whose host may be busy."""
        with self.lock:
            return first.run() or any(device.run() for device in self.devices)

    def wait(self, device: SimulatedCupy, done: Callable[[], bool]) -> None:
        """Run devices until something is done."""
        began = time.monotonic()
        while not done():
            if self.run(device):
                began = time.monotonic()
                continue
            if BUSY:
                began = time.monotonic()
            elif time.monotonic() - began > PATIENCE:
                raise RuntimeError(f"the simulated device hangs: {self._why()}")
            time.sleep(1e-5)  # another rank must come first

    def _why(self) -> str:
        """Say what the streams wait for."""
        with self.lock:
            waiting = [f"GPU of rank {i}: {d.described()}" for i, d in enumerate(self.devices)]
            met = [
                f"{k} by {sorted(m)}: {[w for w, _ in m.values()]}"
                for k, m in self._meetings.items()
            ]
        return "; ".join([*waiting, *met])

    def new_group(self) -> int:
        """Number a group of ranks."""
        with self.lock:
            self.groups += 1
            return self.groups

    def bring(self, key: Key, rank: int, what: tuple[Any, ...], value: Any) -> None:
        """Leave a rank's contribution to a collective operation."""
        with self.lock:
            self._meetings.setdefault(key, {})[rank] = (what, value)

    def brought(self, key: Key, size: int) -> list[Any] | None:
        """What all ranks have brought; None until the last has come."""
        with self.lock:
            here = self._meetings[key]
            if len(here) < size:
                return None
            calls = {what for what, _ in here.values()}
            assert len(calls) == 1, f"ranks make different calls of NCCL: {calls}"
            values = [here[rank][1] for rank in range(size)]
            self._taken[key] = self._taken.get(key, 0) + 1
            if self._taken[key] == size:
                del self._meetings[key], self._taken[key]
            return values
