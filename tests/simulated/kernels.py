"""Our CUDA kernels on the host: the same sources, compiled by g++ with `emulator.h`.

They are compiled once: the file lies in the user's cache, and carries a digest of what it is made
of.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pydtnn.files import user_cache, write_file
from pydtnn.kernels.cuda.module import SOURCES, source_files
from tests.simulated.cupy.array import DeviceArray
from tests.simulated.cupy.fabric import BUSY

if TYPE_CHECKING:
    pass

HEADER = Path(__file__).parent / "emulator.h"
COMPILER = shutil.which("g++")
OPTIONS = ("-std=c++20", "-O2", "-mf16c", "-shared", "-fPIC", "-w")
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
KERNEL = re.compile(r'extern "C"\s+void\s+(\w+)')


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
        library, full = build(self._name, element), f"{name}_{element}"
        entry = ctypes.cast(library[f"call_{full}"], ctypes.c_void_p)
        count = library[f"count_{full}"]()

        def launch(grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple) -> None:
            assert len(arguments) == count, f"{full} takes {count} arguments"
            assert all(n > 0 for n in (*grid, *block)), f"{full}: invalid configuration"
            values = [cell(argument) for argument in arguments]
            addresses = (ctypes.c_void_p * count)(*map(ctypes.addressof, values))
            sizes = [(ctypes.c_uint * 2)(*(*n, 1)[:2]) for n in (grid, block)]
            arrays = [a for a in arguments if isinstance(a, DeviceArray)]
            held = values, [a.memory for a in arrays]  # what the addresses are of

            def call() -> None:
                assert held
                library.launch(entry, *sizes, addresses)

            self._put(call, [a.block for a in arrays])

        return launch


def cell(argument: Any) -> Any:
    """Lay an argument out as CuPy does."""
    if isinstance(argument, np.uint64):
        return ctypes.c_uint64(int(argument))
    if hasattr(argument, "__array_function__"):
        if not hasattr(argument.data, "ptr"):
            raise TypeError(f"Unsupported type {type(argument)}")
        return ctypes.c_uint64(argument.data.ptr)
    return ctypes.c_double(argument) if isinstance(argument, float) else ctypes.c_int64(argument)


def build(name: str, element: str) -> ctypes.PyDLL:
    """Load a source's kernels for one element type, compiled now where they never were.

    Only one thread is in a kernel at a time: the emulator's own state is global.
    """
    library = _build(name, element)
    assert isinstance(library, ctypes.PyDLL), library[:2000]
    return library


@cache
def _build(name: str, element: str) -> ctypes.PyDLL | str:
    """Compile and load, or say what the compiler said: once, however many tests ask."""
    assert COMPILER
    source = f'#include "{HEADER}"\n#include "{SOURCES / name}.cu"\n'
    digest = hashlib.sha256(repr((OPTIONS, HALVES, element, version())).encode())
    for text in (HEADER.read_text(), Path(__file__).read_text(), *source_files(name).values()):
        digest.update(text.encode())
    path = folder() / f"{name}-{element}-{digest.hexdigest()[:16]}.so"
    if path.exists():
        return ctypes.PyDLL(str(path))
    plain = [COMPILER, *OPTIONS, f"-DELEMENT={element}", "-x", "c++"]
    text, _ = run([*plain, "-E", "-P", "-"], source)
    for kernel in KERNEL.findall(text):
        if kernel.endswith(f"_{element}"):
            source += CALLED.replace("KERNEL", kernel)
    with tempfile.TemporaryDirectory() as place, busy(f"compiling {name}"):
        made = Path(place) / "kernels.so"
        _, problem = run([*plain, "-o", str(made), "-"], source + HALVES)
        if problem:
            return problem
        with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
            write_file("simulated kernels", path, made.read_bytes())
            older = sorted(path.parent.glob(f"{name}-{element}-*"), key=lambda p: p.stat().st_mtime)
            for outdated in older[:-KEPT]:
                outdated.unlink(missing_ok=True)
        return ctypes.PyDLL(str(made))


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
