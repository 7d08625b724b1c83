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
from pathlib import Path
from typing import Any

from pydtnn.kernels.cuda import find
from pydtnn.kernels.dtypes import DTYPES
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
