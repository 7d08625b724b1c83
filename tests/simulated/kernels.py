"""Our CUDA kernels on the host: the same sources, compiled by g++ with `emulator.h`.

They are compiled once: the file lies in the user's cache, and carries a digest of what it is made
of. The detector of races (`watched.py`) has its own, which are slower.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from pydtnn.kernels.cuda.module import SOURCES, source_files
from pydtnn.utils.files import user_cache, write_file
from tests.simulated.cupy.array import DeviceArray
from tests.simulated.cupy.fabric import BUSY

HERE = Path(__file__).parent
HEADER, WATCH, DETECTOR = (HERE / name for name in ("emulator.h", "watch.h", "watch.cpp"))
COMPILER = shutil.which("g++")
OPTIONS = ("-std=c++20", "-fPIC", "-w", "-U_FORTIFY_SOURCE")
"""Fibers of the emulator jump between stacks, which the checks of fortified code do not allow."""

PLAIN = ("-O2", "-mf16c")
WATCHED = (
    *("-O1", "-g1", "-mf16c", "-DWATCHED", "-fno-gnu-unique", "-fsanitize=thread"),
    *("--param", "tsan-instrument-func-entry-exit=0"),
    "-fsanitize=alignment,bounds,shift,signed-integer-overflow",
)
"""What the sanitizers call is in the detector: their libraries are not linked."""

MOST = (2**31 - 1, 65535, 1024)
"""Blocks along both axes of a grid, and threads of a block, that CUDA takes."""

KEPT = 8
"""Versions of a source's kernels that stay in the cache: of other branches, perhaps."""

HALVES = """
static float widen(float16 x) { return _cvtsh_ss(x.bits); }
static void narrow(float x, float16 &y) { y.bits = _cvtss_sh(x, 0); }
static void narrow(float x, bfloat16 &y) {
    const unsigned bits = same_bits<unsigned>(x);
    y.bits = x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16; /* to even */
}
"""
CALLED = """
extern "C" void call_KERNEL(void **a) { emulator::invoke(KERNEL, a); }
extern "C" int count_KERNEL() { return emulator::count(KERNEL); }
"""
KERNEL = re.compile(r'extern "C"[^;{]*?\bvoid\s+(\w+)')


class Module:
    """Stands for `pydtnn.kernels.cuda.module.Module`.

    Parameters
    ----------
    name : str
        Of the source.
    put : callable
        Enqueues a call that touches some memory.
    """

    def __init__(self, name: str, put: Callable[..., None]) -> None:
        self._name, self._put = name, put

    def kernel(self, name: str, element: str) -> Callable[..., None]:
        """Return kernel ``name_element``: called with grid, block and arguments."""
        library, full = self.library(element), f"{name}_{element}"
        entry = ctypes.cast(library[f"call_{full}"], ctypes.c_void_p)
        count = library[f"count_{full}"]()

        def launch(grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple) -> None:
            assert len(arguments) == count, f"{full} takes {count} arguments"
            asked = (*grid, *[1] * (2 - len(grid)), prod(block))
            fits = all(0 < n <= most for n, most in zip(asked, MOST, strict=True))
            assert fits, f"{full}: invalid configuration {grid}, {block}"
            values = [cell(argument) for argument in arguments]
            addresses = (ctypes.c_void_p * count)(*map(ctypes.addressof, values))
            sizes = [(ctypes.c_uint * 2)(*(*n, 1)[:2]) for n in (grid, block)]
            arrays = [a for a in arguments if isinstance(a, DeviceArray)]
            held = values, [a.memory for a in arrays]  # what the addresses are of

            def call() -> None:
                assert held
                self.run(full, lambda: library.launch(entry, *sizes, addresses))

            self._put(call, [a.block for a in arrays])

        return launch

    def library(self, element: str) -> ctypes.PyDLL:
        """Return the kernels of the source for an element type."""
        return build(self._name, element)

    def run(self, kernel: str, call: Callable[[], int]) -> None:
        """Run a kernel by a call that tells how many threads are left waiting."""
        stuck = call()
        assert not stuck, f"{kernel}: {stuck} threads wait where not all of their block come to"


def cell(argument: Any) -> Any:
    """Lay an argument out as CuPy does."""
    if isinstance(argument, np.uint64):
        return ctypes.c_uint64(int(argument))
    if hasattr(argument, "__array_function__"):
        if not hasattr(argument.data, "ptr"):
            raise TypeError(f"Unsupported type {type(argument)}")
        return ctypes.c_uint64(argument.data.ptr)
    return ctypes.c_double(argument) if isinstance(argument, float) else ctypes.c_int64(argument)


def build(name: str, element: str, *, watched: bool = False) -> ctypes.PyDLL:
    """Load a source's kernels for one element type, compiled now where they never were.

    Only one thread is in a kernel at a time: the emulator's own state is global.
    """
    library = _build(name, element, watched)
    assert isinstance(library, ctypes.PyDLL), library[:2000]
    return library


@cache
def _build(name: str, element: str, watched: bool) -> ctypes.PyDLL | str:
    """Load, or say what the compiler said: once, however many tests ask."""
    if watched:
        detector()  # whose functions they call
    options = [*OPTIONS, *(WATCHED if watched else PLAIN), f"-DELEMENT={element}"]
    source = f'#include "{HEADER}"\n#include "{SOURCES / name}.cu"\n'

    def make(out: Path) -> str:
        text, _ = run(command(options, "-E", "-P"), source)
        kernels = [name for name in KERNEL.findall(text) if name.endswith(f"_{element}")]
        called = [CALLED.replace("KERNEL", kernel) for kernel in kernels]
        return compile_source(options, "".join([source, *called, HALVES]), out)

    texts = [HEADER.read_text(), WATCH.read_text(), *source_files(name).values()]
    kind = f"{'watched-' * watched}{Path(name).name}-{element}"
    return load(kind, repr(options), texts, make)


@cache
def detector() -> ctypes.PyDLL:
    """Load the detector of races, for kernels that are watched."""
    options, source = [*OPTIONS, "-O2"], f'#include "{DETECTOR}"\n'
    texts = [WATCH.read_text(), DETECTOR.read_text()]
    library = load(
        *("detector", repr(options), texts, lambda out: compile_source(options, source, out)),
        mode=ctypes.RTLD_GLOBAL,
    )
    assert isinstance(library, ctypes.PyDLL), library[:2000]
    return library


def load(
    kind: str,
    options: str,
    texts: list[str],
    make: Callable[[Path], str],
    mode: int = ctypes.DEFAULT_MODE,
) -> ctypes.PyDLL | str:
    """Load what lies in the cache, or what `make` makes now; or return what is wrong with it."""
    digest = hashlib.sha256(f"{options}{version()}{Path(__file__).read_text()}".encode())
    for text in texts:
        digest.update(text.encode())
    path = folder() / f"{kind}-{digest.hexdigest()[:16]}.so"
    if path.exists():
        return ctypes.PyDLL(str(path), mode)
    with tempfile.TemporaryDirectory() as place, busy(f"compiling {kind}"):
        made = Path(place) / "made.so"
        if problem := make(made):
            return problem
        with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
            write_file("simulated kernels", path, made.read_bytes())
            older = sorted(path.parent.glob(f"{kind}-*"), key=lambda p: p.stat().st_mtime)
            for outdated in older[:-KEPT]:
                outdated.unlink(missing_ok=True)
        return ctypes.PyDLL(str(path if path.exists() else made), mode)


def compile_source(options: list[str], source: str, out: Path) -> str:
    """Make a library of one source; return what the compiler said if it failed."""
    made = str(out.with_suffix(".o"))
    _, problem = run(command(options, "-c", "-o", made), source)
    return problem or run([str(COMPILER), "-shared", "-o", str(out), made], "")[1]


def command(options: list[str], *more: str) -> list[str]:
    """Call the compiler for the source that it is given."""
    assert COMPILER
    return [COMPILER, *options, "-I", str(SOURCES), "-x", "c++", *more, "-"]


def folder() -> Path:
    """Where compiled kernels are kept: in the user's cache, if the user has one."""
    with contextlib.suppress(RuntimeError):
        return user_cache() / "simulated"
    return Path(tempfile.gettempdir()) / "pydtnn-simulated"


@contextlib.contextmanager
def busy(what: str) -> Iterator[None]:
    """Ask others not to take a wait for a hang meanwhile."""
    BUSY.add(what)
    try:
        yield
    finally:
        BUSY.discard(what)


@cache
def version() -> str:
    assert COMPILER
    return run([COMPILER, "--version"], "")[0]


def run(command: list[str], source: str) -> tuple[str, str]:
    """Run the compiler; return its output, and what it said if it failed."""
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    return done.stdout, done.stderr if done.returncode else ""
