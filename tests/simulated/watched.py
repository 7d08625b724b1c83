"""Our kernels under a detector of races (`watch.cpp`): what compute-sanitizer finds on a GPU.

    watched = Watched()
    watched.families.update.sgd(...)      # on arrays of `watched.array`
    assert not watched.findings

=============  =====================================================================================
race           two threads use one element, one writes, and neither must come before the other
outside        of the arrays that the launch was given, and of shared memory
unwritten      memory is read that nobody has written
misaligned     an access of several elements at an address that does not allow it
overflow       of a signed integer
diverged       threads meet at different barriers, or a mask has other lanes than come
stuck          threads wait for others that never come
counters       of blocks are not 0 afterwards, as the next launch needs them
=============  =====================================================================================

Everything is judged by what orders accesses, not by the order in which they happened, so what is
found is found in every run. A barrier or fence can be left out of account (`without`), to see that
it is missed. What is not seen: arrays in shared memory that are left for the next one (only what is
indexed by its name has bounds), and kernels that hang since blocks wait for each other.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pydtnn.kernels.cuda.images import PrepareKernel
from pydtnn.kernels.cuda.module import SOURCES
from pydtnn.kernels.cuda.pool import CudaPool
from tests.simulated import kernels
from tests.simulated.host import HostModule, families

KINDS = ("race", "outside", "unwritten", "misaligned", "overflow", "diverged", "stuck")
MANY = 0xFFFF  # for a thread, as in watch.cpp
SYNCHRONISATION = re.compile(r"\b__(syncthreads|threadfence)\(\)")
LOCAL = re.compile(r"_ZZ.*E\d+([a-z]\w*)$")  # a variable of a function: of shared memory


class _Range(ctypes.Structure):
    _fields_ = (
        ("begin", ctypes.c_void_p),
        ("size", ctypes.c_longlong),
        ("grain", ctypes.c_int),
        ("shared", ctypes.c_int),
        ("fresh", ctypes.c_void_p),
    )


class _Party(ctypes.Structure):
    _fields_ = (
        ("block", ctypes.c_uint),
        ("thread", ctypes.c_uint),
        ("write", ctypes.c_int),
        ("line", ctypes.c_int),
        ("file", ctypes.c_char_p),
        ("code", ctypes.c_void_p),
    )


class _Finding(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int),
        ("parties", ctypes.c_int),
        ("address", ctypes.c_void_p),
        ("party", _Party * 2),
    )


class Finding(NamedTuple):
    """What is wrong with a kernel.

    Parameters
    ----------
    kind : str
        See above.
    kernel : str
    what : str
        Who did what, and where.
    """

    kind: str
    kernel: str
    what: str


class Site(NamedTuple):
    """A line of a source with a barrier or a fence."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def sites() -> list[Site]:
    """All barriers and fences of our sources."""
    found = []
    for path in sorted(SOURCES.iterdir()):
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            found += [Site(path.name, number)] * bool(SYNCHRONISATION.search(line))
    return found


class Watched:
    """Families whose kernels are watched.

    Attributes
    ----------
    families : namespace
        ``families.norm`` and the others, with ``images``.
    findings : list of Finding
    launched : set of str
        Names of the kernels that ran.
    without : Site or None
        A barrier or fence that orders nothing.
    shift : int
        Elements after an aligned address, at which new arrays begin.
    """

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.launched: set[str] = set()
        self.without: Site | None = None
        self.shift = 0
        self._unwritten: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._detector = kernels.detector()
        self.families = made = families()
        self._empty, made.norm.xp.empty = made.norm.xp.empty, self.empty  # all have one xp
        made.device.module = self.module
        made.pool, made.images = CudaPool(made.norm.xp, made.device), PrepareKernel(made.device)

    def module(self, source: str) -> Any:
        """Return the kernels of a source, which are watched."""
        return _Module(source, self)

    def array(self, values: Any, dtype: Any = None) -> Any:
        """Make an array of the device of values; NaN throughout is memory that nobody wrote."""
        values = np.array(values, dtype)
        if values.size and values.dtype.kind not in "iu" and np.isnan(values.astype(float)).all():
            return self.empty(values.shape, values.dtype)
        array = self._shifted(values.shape, values.dtype)
        array[...] = values
        return array

    def empty(self, shape: Any, dtype: Any = "float64") -> Any:
        """Allocate memory that nobody wrote."""
        array = self._shifted(shape, dtype)
        if array.nbytes:
            unwritten = np.ones(array.nbytes, np.uint8)
            self._unwritten[array.ctypes.data] = array, unwritten  # no other array can lie there
        return array

    def _shifted(self, shape: Any, dtype: Any) -> Any:
        whole = self._empty(int(np.prod(shape)) + self.shift, dtype)
        return whole[self.shift :].reshape(shape)

    def forget(self) -> None:
        """Forget all arrays."""
        self._unwritten.clear()

    @contextmanager
    def watching(self, library: ctypes.PyDLL, kernel: str, arrays: list[Any]) -> Iterator[None]:
        """Watch a launch that was given these arrays."""
        self.launched.add(kernel)
        base, variables = symbols(library)
        ranges = [*self._ranges(arrays)]
        for at, size, _, shared in variables:
            ranges.append(_Range(base + at, size, shared, shared, None))
        file, line = self.without or ("", 0)
        given = (_Range * len(ranges))(*ranges)
        self._detector.watch_launch(given, len(ranges), file.encode() or None, line)
        yield
        found = ctypes.POINTER(_Finding)()
        for i in range(self._detector.watch_findings(ctypes.byref(found))):
            self.findings.append(self._finding(library, kernel, arrays, found[i]))
        arrived = self.families.device.arrived
        if arrived.any():
            self.findings.append(Finding("counters", kernel, f"{arrived[arrived != 0]} are left"))
            arrived[...] = 0

    def _ranges(self, arrays: list[Any]) -> Iterator[_Range]:
        """Memory of the arrays, each place once."""
        end = 0
        for array in sorted(arrays, key=lambda a: (a.ctypes.data, -a.nbytes)):
            begin = array.ctypes.data
            if begin + array.nbytes <= end:
                continue
            assert begin >= end, "two arguments overlap"
            end = begin + array.nbytes
            _, unwritten = self._unwritten.get(begin, (None, None))
            fresh = None if unwritten is None else unwritten.ctypes.data
            yield _Range(begin, array.nbytes, array.itemsize, 0, fresh)

    def _finding(
        self, library: ctypes.PyDLL, kernel: str, arrays: list[Any], found: _Finding
    ) -> Finding:
        kind, parts = KINDS[found.kind], []
        for party in found.party[: found.parties]:
            where = f"{Path(party.file.decode()).name}:{party.line}" if party.file else ""
            at = where or lines(library, party.code)
            who = "many threads" if party.thread == MANY else f"thread {party.thread}"
            does = ("writes" if party.write else "reads") if kind == "race" else "is"
            parts.append(f"{who} of block {party.block} {does} at {at}")
        what = "; ".join(parts)
        if found.address:
            what = f"{self._memory(library, arrays, found.address)}: {what}"
        return Finding(kind, kernel, what)

    def _memory(self, library: ctypes.PyDLL, arrays: list[Any], address: int) -> str:
        base, variables = symbols(library)
        for at, size, name, _ in variables:
            if 0 <= address - base - at < size:
                return f"{name} + {address - base - at}"
        for number, array in enumerate(arrays):
            if 0 <= address - array.ctypes.data < array.nbytes:
                offset = (address - array.ctypes.data) // array.itemsize
                return f"array {number} ({array.dtype} {array.shape}), element {offset}"
        return "memory of nobody"


class _Module(HostModule):
    """The kernels of a source, watched."""

    def __init__(self, name: str, watched: Watched) -> None:
        super().__init__(name)
        self._source, self._watched = name, watched
        self._arrays: list[Any] = []

    def kernel(self, name: str, element: str) -> Callable[..., None]:
        launch = super().kernel(name, element)

        def watch(grid: Any, block: Any, arguments: tuple[Any, ...]) -> None:
            self._arrays = [a for a in arguments if isinstance(a, np.ndarray) and a.nbytes]
            launch(grid, block, arguments)

        return watch

    def library(self, element: str) -> ctypes.PyDLL:
        return kernels.build(self._source, element, watched=True)

    def run(self, kernel: str, call: Callable[[], int]) -> None:
        element = kernel.rsplit("_", 1)[1]
        with self._watched.watching(self.library(element), kernel, self._arrays):
            call()


def kernel_names(library: ctypes.PyDLL) -> set[str]:
    """Names of the kernels in a library."""
    return set(re.findall(r" T call_(\w+)$", listing(library), re.MULTILINE))


@cache
def listing(library: ctypes.PyDLL) -> str:
    """All symbols of a library."""
    done = subprocess.run(["nm", "-S", library._name], capture_output=True, text=True, check=True)
    return done.stdout


@cache
def symbols(library: ctypes.PyDLL) -> tuple[int, list[tuple[int, int, str, int]]]:
    """Variables of a library: (place, bytes, name, whether they are shared memory).

    Returns
    -------
    tuple of (int, list)
        Address of place 0; and the variables.
    """
    variables, base = [], 0
    for line in listing(library).splitlines():
        at, *rest = line.split(maxsplit=3)
        if len(rest) == 3 and rest[1] in "bBdDuVv":
            local = LOCAL.match(rest[2])
            name = local[1] if local else rest[2]
            variables.append((int(at, 16), int(rest[0], 16), name, int(bool(local))))
        if rest[-1] == "launch":
            address = ctypes.cast(library.launch, ctypes.c_void_p).value
            assert address
            base = address - int(at, 16)
    return base, variables


def lines(library: ctypes.PyDLL, code: int) -> str:
    """Name the lines of the sources that an instruction belongs to, the innermost first."""
    address = hex(code - 1 - symbols(library)[0])
    done = subprocess.run(
        ["addr2line", "-ise", library._name, address], capture_output=True, text=True, check=False
    )
    return " in ".join(line.split()[0] for line in done.stdout.splitlines()[:4])
