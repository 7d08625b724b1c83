"""Choice between several algorithms of a kernel, by measurement or by rule.

A key is an operation, a geometry, a batch and a dtype; instruction set and threads are the
backend's. Operations fused into a convolution (a deferred input, sums, an activation) are not part
of the key: they cost about the same for every algorithm; on a GPU, fusion is a separate choice.
Another batch of the same geometry uses the choice of the nearest one, so the last batch of an epoch
and an evaluation are not measured again.

The idea is from PyDTNN's BestOf, which times alternatives in their first calls.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import resource
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydtnn.kernels.geometry import ConvGeometry
from pydtnn.utils.files import MAX_TEXT_B, read_file, user_cache
from pydtnn.utils.names import unknown

CACHE_VARIABLE = "PYDTNN_CACHE"
"""Environment variable with the path of the folder."""

_UNUSABLE = (
    "measured choices cannot be stored, so another run may choose other algorithms; "
    f"set {CACHE_VARIABLE} to a writable folder (%s)"
)

_log = logging.getLogger("pydtnn.kernels")


@dataclass(frozen=True)
class Winner:
    """The chosen candidate, and the times of all candidates in s, if known."""

    name: str
    seconds: dict[str, float]


Table = dict[str, dict[int, Winner]]
"""Choices by operation (a string with geometry and dtype), then by batch."""


class AutotunerFile:
    """The choices of this machine: a line of JSON for each, of which the first counts.

    Processes append lines, which needs no lock, and read the file again to see which was first. A
    file that cannot be read or written is not an error: choices are then measured again in the next
    run, and the logger "pydtnn.kernels" logs one warning.

    Parameters
    ----------
    machine : str or callable
        Key of the measurements, or a function that returns it when the file is used.
    """

    def __init__(self, machine: str | Callable[[], str]) -> None:
        self._machine = machine
        self._known: dict[tuple[Any, ...], Winner] = {}
        self._warned = False

    @property
    def machine(self) -> str:
        """Key of the measurements."""
        return self._machine if isinstance(self._machine, str) else self._machine()

    @property
    def path(self) -> Path:
        """Path of the file.

        Raises
        ------
        RuntimeError
            If the user has no home directory, and neither PYDTNN_CACHE nor XDG_CACHE_HOME is set.
        """
        folder = os.environ.get(CACHE_VARIABLE)
        name = hashlib.sha256(self.machine.encode()).hexdigest()[:12]
        return (Path(folder).expanduser() if folder else user_cache()) / f"choices-{name}.jsonl"

    def count(self) -> int:
        """Count the stored choices, in all settings."""
        self._read()
        return len(self._known)

    def find(
        self, setting: str, operation: str, batch: int, candidates: Iterable[str]
    ) -> Winner | None:
        """Return the choice among exactly these candidates, if there is one."""
        if not self._known:
            self._read()
        return self._known.get(_key(setting, operation, batch, candidates))

    def add(self, setting: str, operation: str, batch: int, choice: Winner) -> Winner:
        """Store a choice, unless another process has stored one; return the valid one."""
        key = _key(setting, operation, batch, choice.seconds)
        if self._read() and key not in self._known:
            where = {"setting": setting, "operation": operation, "batch": batch}
            line = json.dumps({"machine": self.machine, **where, **asdict(choice)})
            self._read(f"\n{line}\n".encode())  # behind a line that may be incomplete
        return self._known.get(key, choice)

    def _read(self, added: bytes = b"") -> bool:
        """Append to the file if there is anything to add, and read it; return whether it can be."""
        try:
            if added:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with open(self.path, "ab") as file:
                    file.write(added)
            self._known = self._choices(read_file("choices of algorithms", self.path, MAX_TEXT_B))
        except FileNotFoundError:
            return not added
        except ValueError:  # longer than any such file
            with contextlib.suppress(OSError):
                self.path.unlink()
        except (OSError, RuntimeError) as error:
            if not self._warned:
                _log.warning(_UNUSABLE, error)
            self._warned = True
            return False
        return True

    def _choices(self, content: bytes) -> dict[tuple[Any, ...], Winner]:
        """Return the choices in the lines of the file; others, if it is damaged, do not count."""
        found: dict[tuple[Any, ...], Winner] = {}
        for line in content.splitlines():
            with contextlib.suppress(*_DAMAGED):
                entry = json.loads(line)
                times = {str(name): float(time) for name, time in entry["seconds"].items()}
                where = entry["setting"], entry["operation"], int(entry["batch"])
                if entry["machine"] == self.machine and entry["name"] in times:
                    found.setdefault(_key(*where, times), Winner(entry["name"], times))
        return found


_DAMAGED = (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError)
"""What is raised by a line that contains no choice."""


def _key(setting: str, operation: str, batch: int, candidates: Iterable[str]) -> tuple[Any, ...]:
    return (setting, operation, batch, *sorted(candidates))


BUDGET = 0.04
"""Seconds for all candidates together, after a first call of each."""

MAX_MEASUREMENT_S = 0.4
"""Maximum seconds on a machine with constant disturbances."""

ROUNDS = (3, 25)
"""Minimum and maximum number of measurements of each candidate."""


UNDISTURBED = 2
"""Required calls of a candidate without a disturbance."""


def switches() -> int:
    """Count the involuntary context switches of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def shortest_times(
    candidates: tuple[str, ...],
    run: Callable[[str], object],
    clock: Callable[[], float] = time.perf_counter,
    disturbances: Callable[[], int] = switches,
) -> dict[str, float]:
    """Time candidates alternately; return the shortest time of each, in s.

    Other processes increase times; as candidates alternate, all are affected equally. A call during
    which a thread lost its core is discarded, as its time is not meaningful, in particular with
    several threads. A candidate with too few valid calls has an infinite time.
    """
    for name in candidates:  # warm up pages and caches
        run(name)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    least, most = ROUNDS
    began = clock()
    for done in range(1, most + 1):
        for name in candidates:
            before, start = disturbances(), clock()
            run(name)
            took = clock() - start
            if disturbances() == before:
                times[name].append(took)
        known = min(map(len, times.values())) >= UNDISTURBED
        if done >= least and clock() - began >= (BUDGET if known else MAX_MEASUREMENT_S):
            break
    return {name: min(t) if len(t) >= UNDISTURBED else math.inf for name, t in times.items()}


MODES = ("measure", "fixed", "direct")

TUNING_VARIABLE = "PYDTNN_TUNING"

ADVANTAGE = 0.97
"""Largest time of another candidate, relative to the first, to be chosen instead of it: noise must
not decide between equals."""

MAX_BATCH_RATIO = 2
"""Largest ratio of two batches that share a measurement."""

Key = tuple[str, ConvGeometry, int, Any]


class Autotuner:
    """The choices of algorithms of one backend.

    Parameters
    ----------
    mode : str
        "measure": candidates are timed, once per machine; `rule` is used if it is too busy.
        "fixed": always `rule`. "direct": always the first candidate.
    setting : str
        Instruction set and threads of the backend, in words.
    file : AutotunerFile, optional
        File of measured choices, in the user's cache; by default that of no particular machine.
    clock, disturbances : callable
        Arguments of `shortest_times`.

    Attributes
    ----------
    resolved : dict
        Results of `pick`, by (operation, geometry, batch, dtype), looked up in every call of a
        kernel.
    frozen : bool
        Whether measuring is disabled.
    """

    def __init__(
        self,
        mode: str,
        setting: str = "",
        *,
        file: AutotunerFile | None = None,
        clock: Callable[[], float] = time.perf_counter,
        disturbances: Callable[[], int] = switches,
    ) -> None:
        self.mode = mode
        self.setting = setting
        self.file = file or AutotunerFile("any machine")
        self.clock, self.disturbances = clock, disturbances
        self.resolved: dict[Key, str] = {}
        self.frozen = False
        self._reasons: dict[str, str] = {}
        self._table: Table = {}
        self._agreed: dict[str, Table] = {}

    # -- choosing ---------------------------------------------------------------------------------

    def pick(
        self,
        operation: str,
        geometry: ConvGeometry,
        batch: int,
        dtype: Any,
        candidates: tuple[str, ...],
        run: Callable[[str], object],
    ) -> str:
        """Choose one of several algorithms.

        Parameters
        ----------
        operation : str
            "forward", "backward_data" or "backward_filter".
        geometry : ConvGeometry
        batch : int
        dtype : dtype
        candidates : tuple of str
            The first is the default.
        run : callable
            Runs the operation with the given candidate on the caller's arrays. The output is
            undefined afterwards: the caller computes it again with the chosen candidate.

        Returns
        -------
        str
            One of `candidates`.
        """
        key = (operation, geometry, batch, dtype)
        name = self.resolved.get(key)
        if name is None:
            what = f"{operation} {geometry} {dtype}"
            choice, reason = self._choose(key, what, candidates, run)
            name = self.resolved[key] = choice if choice in candidates else candidates[0]
            self._reasons[f"conv.{what}, batch {batch}"] = f"{name}, {reason}"
        return name

    def _choose(
        self, key: Key, what: str, candidates: tuple[str, ...], run: Callable[[str], object]
    ) -> tuple[str, str]:
        """Return a choice and the reason for it."""
        _, geometry, batch, _ = key
        if len(candidates) == 1 or batch == 0:
            return candidates[0], "without an alternative"
        if self.mode == "direct":
            return candidates[0], "as direct algorithms are asked for"
        near = nearest(self._table.get(what, ()), batch)
        if near and (self.frozen or max(near, batch) <= MAX_BATCH_RATIO * min(near, batch)):
            choice = self._table[what][near]
            return choice.name, _reason(choice) if near == batch else f"as for batch {near}"
        if self.frozen or self.mode == "fixed":
            return rule(geometry, candidates), "by rule"
        found = self.file.find(self.setting, what, batch, candidates)
        if found is None:
            times = shortest_times(candidates, run, self.clock, self.disturbances)
            choice = Winner(fastest(times, rule(geometry, candidates)), times)
            found = self.file.add(self.setting, what, batch, choice)
        self._table.setdefault(what, {})[batch] = found
        return found.name, _reason(found)

    def drop(
        self, operation: str, geometry: ConvGeometry, batch: int, dtype: Any, name: str, why: str
    ) -> None:
        """Remove the choice for a key after a candidate became invalid; record the reason."""
        self.resolved.pop((operation, geometry, batch, dtype), None)
        what = f"conv.{operation} {geometry} {dtype}, batch {batch}"
        self._reasons[f"{what}, without {name}"] = why

    def report(self) -> dict[str, str]:
        """Return the choice and the reason for each key.

        Returns
        -------
        dict
            ``{"conv.forward 3x3 16->16 on 32x32 float32, batch 64": "winograd4, by rule"}``
        """
        return dict(self._reasons)

    # -- agreement -------------------------------------------------------------------------

    @property
    def kind(self) -> str | None:
        """Key of machines that share a table of choices. None: no measuring."""
        return f"{self.file.machine}, {self.setting}" if self.mode == "measure" else None

    def open(self) -> Table:
        """Enable measuring of new keys; return the table to which these are added."""
        self.frozen = False
        self.resolved.clear()
        return self._table

    def freeze(self, tables: Mapping[str, Table]) -> None:
        """Disable measuring, and use the table of this kind.

        Parameters
        ----------
        tables : mapping
            By `kind`; all of them become part of `state`.
        """
        self._agreed = self._agreed | dict(tables)
        self._table = self._agreed.get(self.kind or "", {})
        self.frozen = True
        self.resolved.clear()

    def state(self) -> dict[str, Any]:
        """Return the common tables without times, to continue with the same choices."""
        names = {
            kind: {
                what: {str(batch): choice.name for batch, choice in batches.items()}
                for what, batches in table.items()
            }
            for kind, table in self._agreed.items()
        }
        return {"measured": names} if names else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the state returned by `state`; other kinds of machines measure again."""
        self._agreed = {
            kind: {
                what: {int(batch): Winner(name, {}) for batch, name in batches.items()}
                for what, batches in table.items()
            }
            for kind, table in state["measured"].items()
        }
        self._table = self._agreed.get(self.kind or "", {})
        self.resolved.clear()


def create_autotuner(
    mode: str | None, setting: str = "", file: AutotunerFile | None = None
) -> Autotuner:
    """Create the autotuner of a backend.

    Parameters
    ----------
    mode : str, optional
        By default `PYDTNN_TUNING`, otherwise "measure".
    setting, file
        See `Autotuner`.

    Raises
    ------
    ValueError
        If the mode is unknown.
    """
    name = mode or os.environ.get(TUNING_VARIABLE) or MODES[0]
    if name not in MODES:
        raise ValueError(unknown("tuning" if mode else f"value of {TUNING_VARIABLE}", name, MODES))
    return Autotuner(name, setting, file=file)


def rule(geometry: ConvGeometry, candidates: tuple[str, ...]) -> str:
    """Choose by a fixed rule: the algorithm that was fastest in nearly all measurements.

    Winograd's transforms require enough channels to be efficient, and maps larger than its tiles.
    With a stride of 2, filters larger than 3 x 3 gain in nearly all cases.
    """
    if "polyphase" in candidates:
        large = geometry.kernel[0] > 3 and min(geometry.output) >= 8 and geometry.filters >= 16
        return "polyphase" if large else candidates[0]
    if min(geometry.channels, geometry.filters) < 16 or min(geometry.output) < 2:
        return candidates[0]
    tiles = "winograd4" if min(geometry.output) >= 4 else "winograd2"
    if "winograd5" in candidates and max(geometry.output) >= 5:
        tiles = "winograd5"
    return tiles if tiles in candidates else candidates[0]


def fastest(times: Mapping[str, float], otherwise: str) -> str:
    """Return the candidate with the shortest time, or the first one if that is about as fast.

    `otherwise` is returned if a time is missing.
    """
    if max(times.values()) == math.inf:
        return otherwise
    first, best = next(iter(times)), min(times, key=times.__getitem__)
    return best if times[best] <= ADVANTAGE * times[first] else first


def nearest(batches: Iterable[int], batch: int) -> int | None:
    """Return the batch with the smallest ratio to this one; of two, the smaller."""
    batches = (b for b in batches if b > 0)  # an edited file may contain others
    return min(batches, key=lambda b: (max(b, batch) / min(b, batch), b), default=None)


def _reason(choice: Winner) -> str:
    """Format the reason: "measured: winograd4 0.58 ms, direct 1.04 ms"."""
    if not choice.seconds:
        return "as agreed on before"
    if max(choice.seconds.values()) == math.inf:
        return "by rule, as the machine was too busy for measuring"
    times = sorted(choice.seconds.items(), key=lambda item: item[1])
    return "measured: " + ", ".join(f"{name} {1e3 * s:.3g} ms" for name, s in times)
