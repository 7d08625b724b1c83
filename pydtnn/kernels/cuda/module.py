"""Our CUDA sources as machine code: found, compiled once, loaded.

A source ``src/NAME.cu`` is compiled for one GPU architecture, and for one element type or all of
them, into a cubin. The cubin's file name carries a digest of all that went into it, so a
folder of them never goes stale: prebuilt ones lie where PYDTNN_CUBINS says, those that were
compiled on demand in the user's cache. The sources include nothing but each other, so that NVRTC,
which comes with CuPy, needs no CUDA toolkit.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from pydtnn.kernels.cuda import find
from pydtnn.kernels.cuda.layout import MAX_PARTS, columns
from pydtnn.kernels.dtypes import DTYPES
from pydtnn.kernels.reference.family import Array, Number
from pydtnn.utils.files import user_cache, write_file

ELEMENTS = DTYPES
"""Element types that the kernels know, by the names that dtypes have."""

REALS = ELEMENTS[:2]
"""Those that are computed with: what parameters, coefficients and sums have."""

SOURCES = Path(__file__).parent / "src"
PREBUILT = "PYDTNN_CUBINS"
CACHE = "PYDTNN_CACHE"
OPTIONS = ("-std=c++17",)

NVRTC_OPTIONS = ("--device-as-default-execution-space",)
"""NVRTC 13.0 and older take the lambdas of our kernels for functions of the host: an error."""

_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)

Compiler = Callable[[str, str, str | None], bytes]


def source_names() -> list[str]:
    """Names of all sources, without the suffix."""
    return sorted(path.stem for path in SOURCES.glob("*.cu"))


def source_files(name: str) -> dict[str, str]:
    """Texts of a source and of all that it includes, by file name; the source itself first."""
    texts: dict[str, str] = {}
    waiting = [f"{name}.cu"]
    while waiting:
        file = waiting.pop(0)
        if file not in texts:
            texts[file] = (SOURCES / file).read_text(encoding="utf-8")
            waiting += _INCLUDE.findall(texts[file])
    return texts


def elements(name: str) -> tuple[str, ...]:
    """Element types that a source has kernels for; it ends in a macro with their name."""
    text = (SOURCES / f"{name}.cu").read_text(encoding="utf-8")
    kinds = {"ELEMENTS": ELEMENTS, "REALS": REALS}
    last = re.search(r"^(\w+)\(DEFINE\)\s*\Z", text, re.MULTILINE)
    return kinds[last[1]] if last else ("float64",)


def options(element: str | None) -> list[str]:
    """Options of the compiler for the kernels of one element type, or of all."""
    return [*OPTIONS, *([] if element is None else [f"-DELEMENT={element}"])]


def cubin_name(name: str, arch: str, element: str | None) -> str:
    """Name of the file that holds this machine code and no other."""
    digest = hashlib.sha256("\0".join([arch, *options(element)]).encode())
    for file, text in source_files(name).items():
        digest.update(f"\0{file}\0{text}".encode())
    return f"{name}-{element or 'all'}-{arch}-{digest.hexdigest()[:16]}.cubin"


def find_nvcc() -> str | None:
    """Where nvcc is: on the path, below CUDA_HOME or CUDA_PATH, or where it usually is."""
    candidates = ["nvcc", *(str(home / "bin" / "nvcc") for home in find.homes())]
    return next(filter(None, map(shutil.which, candidates)), None)


def compile_with_nvcc(name: str, arch: str, element: str | None) -> bytes:
    """Compile a source with nvcc.

    Raises
    ------
    RuntimeError
        If there is no nvcc, or with what it said if it failed.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError(
            "CUDA kernels: there is no nvcc; install a CUDA toolkit or set CUDA_HOME."
        )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.cubin"
        target = [f"-arch={arch}", "-cubin", "-o", str(out), str(SOURCES / f"{name}.cu")]
        run = subprocess.run(
            [nvcc, *options(element), *target], capture_output=True, text=True, check=False
        )
        if run.returncode:
            raise RuntimeError(f"CUDA kernels: nvcc cannot compile {name}.cu: {run.stderr}")
        return out.read_bytes()


def compile_with_nvrtc(name: str, arch: str, element: str | None) -> bytes:
    """Compile a source with the runtime compiler that CuPy has loaded.

    Raises
    ------
    RuntimeError
        With what the compiler said if it failed.
    """
    from cupy_backends.cuda.libs import nvrtc

    (_, text), *included = source_files(name).items()
    headers = [[part.encode() for part in pair] for pair in included]
    program = nvrtc.createProgram(
        text, f"{name}.cu", [text for _, text in headers], [file for file, _ in headers]
    )
    try:
        nvrtc.compileProgram(program, (*options(element), *NVRTC_OPTIONS, f"-arch={arch}"))
        return nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise RuntimeError(f"CUDA kernels: NVRTC cannot compile {name}.cu: {log}") from error
    finally:
        nvrtc.destroyProgram(program)


def find_cubin(name: str, arch: str, element: str | None, compiler: Compiler) -> bytes:
    """Return a source's machine code: prebuilt, from the cache, or compiled now and kept there."""
    file = cubin_name(name, arch, element)
    for folder in _folders():
        with contextlib.suppress(OSError):
            return (folder / file).read_bytes()
    cubin = compiler(name, arch, element)
    for folder in list(_folders())[-1:]:
        with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
            write_file("CUDA kernels", folder / file, cubin)
    return cubin


def prebuild(folder: Path, arch: str, compiler: Compiler = compile_with_nvcc) -> int:
    """Fill a folder for PYDTNN_CUBINS: all sources and their element types for one architecture.

    What is there already stays; the others are compiled on all cores.

    Returns
    -------
    int
        How many files there are for it.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def compile_one(name: str, element: str) -> None:
        path = folder / cubin_name(name, arch, element)
        if not path.exists():
            write_file("CUDA kernels", path, compiler(name, arch, element))

    pairs = [(name, element) for name in source_names() for element in elements(name)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, *zip(*pairs, strict=True)))
    return len(pairs)


def _folders() -> Iterator[Path]:
    """Folders of cubins, the one that is written to last."""
    if prebuilt := os.environ.get(PREBUILT):
        yield Path(prebuilt)
    with contextlib.suppress(RuntimeError):  # a user without a home has no cache
        folder = os.environ.get(CACHE)
        yield (Path(folder) if folder else user_cache()) / "cubins"


class Module:
    """The kernels of one source on the current GPU, compiled when an element type first needs them.

    Parameters
    ----------
    cupy : module
    name : str
        Of the source, without the suffix.
    """

    def __init__(self, cupy: Any, name: str) -> None:
        self._cupy = cupy
        self._name = name
        self._arch = f"sm_{cupy.cuda.Device().compute_capability}"
        self._modules: dict[str, Any] = {}
        self._kernels: dict[str, Any] = {}

    def kernel(self, name: str, element: str) -> Any:
        """Return kernel ``name_element``: called with grid, block and arguments."""
        full = f"{name}_{element}"
        kernel = self._kernels.get(full)
        if kernel is None:
            kernel = self._kernels[full] = self._module(element).get_function(full)
        return kernel

    def _module(self, element: str) -> Any:
        if element not in self._modules:
            module = self._cupy.cuda.function.Module()
            module.load(find_cubin(self._name, self._arch, element, compile_with_nvrtc))
            self._modules[element] = module
        return self._modules[element]


NULL = np.uint64(0)


class DeviceState:
    """What the families of one GPU share.

    Sums meet in memory that is counted by `arrived`, which all kernels use: two of them must not
    run at the same time. So families are used on one stream at a time.

    Parameters
    ----------
    cupy : module

    Attributes
    ----------
    arrived : Array
        Counters of blocks, 0 between kernels.
    go : Array, shape (1,), float64
        Where 0, parameters, the state of optimizers and running statistics stay as they are.
    alive : Array, shape (1,), float64
        0 once and for all when a total has not been finite.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self.arrived = cupy.zeros(MAX_PARTS, "uint32")
        self.go, self.alive = (cupy.ones(1, "float64") for _ in range(2))
        self._modules: dict[str, Module] = {}

    def module(self, source: str) -> Module:
        """Return the kernels of a source."""
        if source not in self._modules:
            self._modules[source] = Module(self._cupy, source)
        return self._modules[source]


class CudaKernels:
    """Mixed into a reference family, whose kernels the subclass replaces by ours.

    A kernel that meets other arrays than ours takes (another type, an output that is not
    contiguous) hands them to the reference; inputs that are not contiguous are copied.

    Parameters
    ----------
    xp : module
        ``cupy``.
    device : Device
    """

    source: ClassVar[str]
    """Name of the source of most of the family's kernels, without the suffix."""

    xp: Any

    def __init__(self, xp: Any, device: DeviceState) -> None:
        super().__init__(xp)  # type: ignore[call-arg]  # the reference family comes after us
        self.device = device

    def launch(
        self,
        name: str,
        element: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        *arguments: Any,
        source: str | None = None,
    ) -> None:
        """Start kernel ``name_element`` on the current stream; None is a null pointer.

        `source` is another than the family's own.
        """
        given = tuple(NULL if a is None else int(a) if type(a) is bool else a for a in arguments)
        self.device.module(source or self.source).kernel(name, element)(grid, block, given)

    def step(self, name: str, blocks: int, threads: int, *arguments: Any) -> None:
        """Start a kernel of step.cu."""
        self.launch(name, "float64", (blocks,), (threads,), *arguments, source="step")

    def per_channel(
        self,
        name: str,
        rows: int,
        channels: int,
        out: Array,
        *arguments: Any,
        arrays: tuple[Array | None, ...],
    ) -> None:
        """Start a map over (rows, channels), whose kernel takes `arguments` and the layout.

        Vectors are loaded if the addresses of `out` and of `arrays`, inputs and coefficients,
        allow it.
        """
        if not (rows and channels):
            return
        width, each = vectors(channels, out, *arrays)
        kernel, layout = f"{name}_{width}", columns(rows, channels, each, summed=False)
        self.launch(
            kernel,
            out.dtype.name,
            layout.grid,
            layout.block,
            *arguments,
            rows,
            channels,
            layout.part_rows,
        )

    def summed(
        self,
        name: str,
        rows: int,
        channels: int,
        sums: int,
        x: Array,
        *arguments: Any,
        arrays: tuple[Array | None, ...] = (),
        run: int | None = None,
    ) -> None:
        """Start a kernel with so many sums per channel; like `per_channel`, of the type of `x`.

        Channels that a thread takes together are of one `run` of so many.
        """
        width, each = vectors(run or channels, x, *arrays)
        kernel, layout = f"{name}_{width}", columns(rows, channels, each, summed=True)
        partial = self.xp.empty(layout.partial(sums), "float64")
        self.launch(
            kernel,
            x.dtype.name,
            layout.grid,
            layout.block,
            *arguments,
            rows,
            channels,
            layout.part_rows,
            partial,
            self.device.arrived,
        )


def native(out: Array, *inputs: Array | None) -> bool:
    """Whether our kernels take these: all of one type that they know, the output contiguous."""
    return (
        out.dtype.name in ELEMENTS
        and out.flags.c_contiguous
        and all(a is None or a.dtype == out.dtype for a in inputs)
    )


def all_of(dtype: Any, *arrays: Array | None) -> bool:
    """Whether these are contiguous arrays of a type."""
    return all(a is None or (a.dtype == dtype and a.flags.c_contiguous) for a in arrays)


def aligned(elements: int, *arrays: Array | None) -> bool:
    """Whether vectors of so many elements can be loaded from all of these, 16 bytes at once."""
    return all(a is None or a.data.ptr % min(elements * a.itemsize, 16) == 0 for a in arrays)


def vectors(neighbours: int, *arrays: Array | None) -> tuple[str, int]:
    """Find how many of these neighbours are loaded at once, by the type of the first array.

    Returns
    -------
    tuple of (str, int)
        The name in kernels, and the elements: of 16 bytes, or one.
    """
    first = next(a for a in arrays if a is not None)
    each: int = 16 // first.itemsize
    fit = neighbours % each == 0 and aligned(each, *arrays)
    return ("wide", each) if fit else ("single", 1)


def number(value: Number) -> tuple[float, Array | None]:
    """Two arguments of a kernel for a number: its value, or where it is in device memory.

    Raises
    ------
    TypeError
        If an array is not of float64.
    """
    if isinstance(value, Real):
        return float(value), None
    array = value
    if array.dtype != "float64" or array.size != 1:
        raise TypeError(
            f"a number in device memory must be one float64, not {array.dtype} {array.shape}"
        )
    return 0.0, array
