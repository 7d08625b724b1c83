"""Our CUDA kernels on the host: compiled by g++ with `emulator.h`, and a `cupy` made of NumPy."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from pydtnn.kernels.cuda.module import SOURCES

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
OPTIONS = ("-std=c++20", "-O1", "-mf16c", "-shared", "-fPIC", "-w")
HALVES = """
static float widen(float16 x) { return _cvtsh_ss(x.bits); }
static void narrow(float x, float16 &y) { y.bits = _cvtss_sh(x, 0); }
static void narrow(float x, bfloat16 &y) {
    const unsigned bits = same_bits<unsigned>(x);
    y.bits = x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16; /* to even */
}
"""
KERNEL = re.compile(r'extern "C"\s+void\s+(\w+)')


class DeviceArray(np.ndarray):
    """A NumPy array that tells its address as CuPy's do."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


def on_device(array: Any) -> Any:
    return np.asarray(array).view(DeviceArray)


class Module:
    """Stands for `pydtnn.kernels.cuda.module.Module`."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name

    def kernel(self, name: str, element: str) -> Any:
        library, counts = build(self._folder, self._name, element)
        full = f"{name}_{element}"
        entry = ctypes.cast(library[f"call_{full}"], ctypes.c_void_p)

        def launch(grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple) -> None:
            assert len(arguments) == counts[full], f"{full} takes {counts[full]} arguments"
            values = [cell(argument) for argument in arguments]
            addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
            sizes = [(ctypes.c_uint * 2)(*(*n, 1)[:2]) for n in (grid, block)]
            library.launch(entry, *sizes, addresses)

        return launch


def cell(argument: Any) -> Any:
    """Lay an argument out as CuPy does."""
    if isinstance(argument, np.ndarray) and argument.ndim >= 0 and not np.isscalar(argument):
        return ctypes.c_uint64(argument.ctypes.data)
    if isinstance(argument, np.uint64):
        return ctypes.c_uint64(int(argument))
    return ctypes.c_double(argument) if isinstance(argument, float) else ctypes.c_int64(argument)


@cache
def build(folder: Path, name: str, element: str) -> tuple[ctypes.CDLL, dict[str, int]]:
    """Compile a source for one element type; count the arguments of each kernel."""
    assert COMPILER
    source = f'#include "{HERE / "emulator.h"}"\n#include "{SOURCES / name}.cu"\n'
    plain = [COMPILER, *OPTIONS, f"-DELEMENT={element}", "-x", "c++"]
    text = run([*plain, "-E", "-P", "-"], source)
    kernels = [kernel for kernel in KERNEL.findall(text) if kernel.endswith(element)]
    for kernel in kernels:
        source += (
            f'extern "C" void call_{kernel}(void **a) {{ emulator::invoke({kernel}, a); }}\n'
            f'extern "C" int count_{kernel}() {{ return emulator::count({kernel}); }}\n'
        )
    source += HALVES
    out = folder / f"{name}_{element}.so"
    run([*plain, "-o", str(out), "-"], source)
    library = ctypes.CDLL(str(out))
    return library, {kernel: library[f"count_{kernel}"]() for kernel in kernels}


def run(command: list[str], source: str) -> str:
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def emulated_cupy() -> Any:
    """What our families use of CuPy."""

    def empty(shape: Any, dtype: Any = "float64") -> Any:
        array = np.empty(shape, dtype)
        array.view("uint8" if array.ndim else array.dtype).fill(255 if array.ndim else 0)  # NaN
        return on_device(array)

    def contiguous(array: Any, dtype: Any = None) -> Any:
        return on_device(np.require(array, dtype, ["C", "A"]))

    def zeros(shape: Any, dtype: Any) -> Any:
        return on_device(np.zeros(shape, dtype))

    names = {name: getattr(np, name) for name in dir(np) if not name.startswith("_")}
    return SimpleNamespace(
        **{**names, "empty": empty, "ascontiguousarray": contiguous, "zeros": zeros}
    )


def families(folder: Path) -> Any:
    """Every family with kernels of our own, emulated."""
    from pydtnn.kernels.cuda.elementwise import Elementwise
    from pydtnn.kernels.cuda.fused import Fused
    from pydtnn.kernels.cuda.linear import Linear
    from pydtnn.kernels.cuda.loss import Loss
    from pydtnn.kernels.cuda.norm import Norm
    from pydtnn.kernels.cuda.own import Device
    from pydtnn.kernels.cuda.random import Random
    from pydtnn.kernels.cuda.update import Update

    class EmulatedDevice(Device):
        def module(self, source: str) -> Any:
            return Module(folder, source)

    xp = emulated_cupy()
    device = EmulatedDevice(xp)

    def multiply(a: Any, b: Any, out: Any, accumulate: bool) -> None:
        out[...] = np.asarray(a) @ np.asarray(b) + (out if accumulate else 0)

    made = {
        family.__name__.lower(): family(xp, device)
        for family in (Elementwise, Fused, Loss, Norm, Random, Update)
    }
    return SimpleNamespace(**made, linear=Linear(xp, device, multiply), device=device)
