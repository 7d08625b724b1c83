"""CuPy, the GPU and NVIDIA's libraries, loaded; one sentence where one of them cannot be used."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydtnn.kernels.cuda import find

Version = tuple[int, int, int]

OLDEST_GPU = 70
"""Compute capability, times ten, of the first GPUs with tensor cores, for which cuDNN 9 is made."""

BUSY = (2, 46)
"""Statuses of CUDA on a GPU that others fill or have for themselves: cudaErrorMemoryAllocation,
cudaErrorDevicesUnavailable."""


class Unavailable(ImportError):
    """The GPU, or a library that it needs, cannot be used; the message is one sentence."""


@dataclass(frozen=True)
class Requirement:
    """A library as we need it.

    Parameters
    ----------
    title : str
        What it is called.
    oldest : Version
        The oldest version that has all the functions we call.
    wheel : str
        The package that brings it, without the major version of CUDA at its end.
    folder : str
        See `pydtnn.kernels.cuda.find.files`.
    number : int, optional
        At the end of the file's name; by default the major version of CUDA.
    version : callable
        Asks a loaded library for its version.
    cuda : callable, optional
        Asks it for the major version of the CUDA that it was built for.
    part : str, optional
        A file beside it that it opens by name when it is used, with its version in the name. It is
        loaded along: the wheels for CUDA 13.0 do not find it themselves, and CuPy loads it only
        where the library has not been loaded before.
    """

    title: str
    oldest: Version
    wheel: str
    folder: str
    number: int | None
    version: Callable[[ctypes.CDLL], Version]
    cuda: Callable[[ctypes.CDLL], int] | None = None
    part: str = ""


@dataclass(frozen=True)
class Library:
    """A library that is loaded.

    Parameters
    ----------
    title, version
        As in `Requirement`.
    path : str
        The file it came from.
    functions : ctypes.CDLL
        Its functions, without prototypes.
    """

    title: str
    version: Version
    path: str
    functions: ctypes.CDLL

    def __str__(self) -> str:
        return f"{self.title} {dotted(self.version)}"


def _cudnn_version(functions: ctypes.CDLL) -> Version:
    functions.cudnnGetVersion.restype = ctypes.c_size_t
    number = functions.cudnnGetVersion()
    if number < 90000:  # before 9 there were three digits for minor and patch
        return number // 1000, number // 100 % 10, number % 100
    return number // 10000, number // 100 % 100, number % 100


def _cudnn_cuda(functions: ctypes.CDLL) -> int:
    functions.cudnnGetCudartVersion.restype = ctypes.c_size_t
    return int(functions.cudnnGetCudartVersion()) // 1000


def _cublas_version(functions: ctypes.CDLL) -> Version:
    parts = (ctypes.c_int * 3)()
    for i in range(3):  # major, minor, patch
        functions.cublasGetProperty(i, ctypes.byref(parts, i * ctypes.sizeof(ctypes.c_int)))
    return parts[0], parts[1], parts[2]


def _cublas_cuda(functions: ctypes.CDLL) -> int:
    return _cublas_version(functions)[0]


def _nccl_version(functions: ctypes.CDLL) -> Version:
    number = ctypes.c_int()
    functions.ncclGetVersion(ctypes.byref(number))
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def _nvrtc_version(functions: ctypes.CDLL) -> Version:
    major, minor = ctypes.c_int(), ctypes.c_int()
    functions.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value, 0


def _nvrtc_cuda(functions: ctypes.CDLL) -> int:
    return _nvrtc_version(functions)[0]


REQUIREMENTS = {
    "cudnn": Requirement(
        *("cuDNN", (9, 0, 0), "nvidia-cudnn-cu", "cudnn", 9), _cudnn_version, _cudnn_cuda
    ),
    "cublas": Requirement(
        *("cuBLAS", (12, 0, 0), "nvidia-cublas", "cublas", None), _cublas_version, _cublas_cuda
    ),
    "nvrtc": Requirement(
        *("NVRTC", (12, 0, 0), "nvidia-cuda-nvrtc", "cuda_nvrtc", None),
        *(_nvrtc_version, _nvrtc_cuda, "libnvrtc-builtins.so.{}.{}"),
    ),
    "nccl": Requirement("NCCL", (2, 18, 0), "nvidia-nccl-cu", "nccl", 2, _nccl_version),
}
"""The libraries by the names of their files."""


@cache
def load(name: str) -> Library:
    """Find and load a library.

    Parameters
    ----------
    name : str
        One of `REQUIREMENTS`.

    Raises
    ------
    Unavailable
        If it is missing, cannot be loaded, is too old, or was built for another CUDA than CuPy.
    """
    wanted, cuda = REQUIREMENTS[name], cuda_major()
    install = f"install it with 'pip install {wheel(name)}'"
    reason = ""
    for file in find.files(name, wanted.number or cuda, wanted.folder, cuda):
        try:
            functions = ctypes.CDLL(file)
        except OSError as error:  # the file is broken, or misses another one
            reason = reason or str(error).splitlines()[0]
            continue
        library = Library(wanted.title, wanted.version(functions), file, functions)
        if wanted.part:
            with contextlib.suppress(OSError):  # it may yet find its part, or not need it
                ctypes.CDLL(str(Path(file).with_name(wanted.part.format(*library.version))))
        built_for = wanted.cuda(functions) if wanted.cuda else cuda
        return checked(wanted, library, built_for, install)
    raise Unavailable(
        f"{wanted.title} was not found in wheels, conda, a CUDA toolkit or the system; "
        f"{install} ({reason})."
    )


def checked(wanted: Requirement, library: Library, cuda: int, install: str) -> Library:
    """Return a library that fits.

    Parameters
    ----------
    wanted : Wanted
    library : Library
    cuda : int
        Major version of the CUDA that it was built for.
    install : str
        How the right one is installed.

    Raises
    ------
    Unavailable
        If it is too old, or was built for another CUDA than CuPy.
    """
    if library.version < wanted.oldest:
        raise Unavailable(
            f"{library} in {library.path} is too old: pydtnn needs {dotted(wanted.oldest)} or "
            f"newer; upgrade it, or take it out of the search path and {install}."
        )
    if cuda != cuda_major():
        raise Unavailable(
            f"{library} in {library.path} was built for CUDA {cuda} and CuPy for CUDA "
            f"{cuda_major()}; {install}."
        )
    return library


def wheel(name: str) -> str:
    """Name of the package that brings a library for the CUDA that CuPy was built for."""
    major, package = cuda_major(), REQUIREMENTS[name].wheel
    if not package.endswith("-cu"):  # one that comes with CUDA has a plain name from 13 on
        return package if major >= 13 else f"{package}-cu{major}"
    return f"{package}{major}"


def cuda_major() -> int:
    """Major version of the CUDA that CuPy was built for; 13 where there is no CuPy."""
    try:
        import cupy
    except ImportError:
        return 13
    return int(cupy.cuda.runtime.runtimeGetVersion()) // 1000


def usable_cupy(device: int | None = None, *, local_rank: int | None = None) -> Any:
    """Import CuPy and make a GPU the current one of this thread.

    Parameters
    ----------
    device : int, optional
        Number of the GPU among those this process sees; by default the current one.
    local_rank : int, optional
        Instead of `device`: this rank among those of its host, which takes the GPU of its number.
        Where a launcher shows each rank its own GPU alone, that is the only one; where there are
        more ranks than GPUs, they share them in turn.

    Returns
    -------
    module
        ``cupy``.

    Raises
    ------
    Unavailable
        If CuPy is missing, or there is no GPU that this process can use.
    ValueError
        If there is no GPU of that number.
    """
    try:
        import cupy
    except ImportError as error:
        raise Unavailable(
            "backend cuda needs CuPy: install it with `pip install cupy-cuda13x`, or cupy-cuda12x "
            f"for a driver older than 580 ({error})."
        ) from error
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
        if local_rank is not None:
            device = local_rank % count
        if device is not None and not 0 <= device < count:
            raise ValueError(f"backend cuda: there is no GPU {device}; this process sees {count}.")
        gpu = cupy.cuda.Device(device)
        gpu.use()
        runtime.free(runtime.malloc(256))  # the first that fails where the GPU is not ours
        capability = gpu.compute_capability  # "90" is 9.0
    except runtime.CUDARuntimeError as error:
        raise Unavailable(_why_not(error, runtime)) from error
    if int(capability) < OLDEST_GPU:
        has, needs = (f"{int(n) // 10}.{int(n) % 10}" for n in (capability, OLDEST_GPU))
        raise Unavailable(
            f"backend cuda: GPU {gpu.id} has compute capability {has}, and pydtnn needs {needs} or "
            "newer; use --device cpu."
        )
    return cupy


def _why_not(error: Exception, runtime: Any) -> str:
    """Say why there is no GPU, and what to do."""
    driver = runtime.driverGetVersion()  # 0 without a driver
    if driver == 0:
        return "backend cuda: no NVIDIA driver is installed here; use --device cpu."
    if driver // 1000 < runtime.runtimeGetVersion() // 1000:
        return (
            f"backend cuda: CuPy was built for CUDA {cuda_major()} and the driver supports "
            f"CUDA {driver // 1000} only; install cupy-cuda{driver // 1000}x or a newer driver."
        )
    if getattr(error, "status", None) in BUSY:
        return (
            f"backend cuda: the GPU is taken by another process ({error}); see nvidia-smi, and "
            "choose another one with CUDA_VISIBLE_DEVICES."
        )
    return f"backend cuda: no GPU can be used ({error}); check nvidia-smi and CUDA_VISIBLE_DEVICES."


def dotted(version: Version) -> str:
    """Write a version: "9.19.0"."""
    return ".".join(map(str, version))
