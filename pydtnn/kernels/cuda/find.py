"""Where NVIDIA's libraries may be: in wheels, in conda, in a CUDA toolkit, in the system.

In this order, so that what is installed beside pydtnn comes before what the machine happens to
have. CuPy 14 brings a package that looks in about the same places (cuda-pathfinder), CuPy 13 none.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

HOMES = ("CUDA_HOME", "CUDA_PATH")
"""Environment variables that name a CUDA toolkit."""

USUAL_HOME = "/usr/local/cuda"
"""Where the toolkit usually is, or a link to it."""


def homes() -> list[Path]:
    """Name the folders where a CUDA toolkit may be: those named explicitly first."""
    return [Path(home) for home in (*filter(None, map(os.environ.get, HOMES)), USUAL_HOME)]


def files(stem: str, version: int, folder: str, cuda: int) -> Iterator[str]:
    """Yield files that a library may be loaded from, those that exist; at last its bare name.

    Parameters
    ----------
    stem : str
        "cudnn" of libcudnn.so.9.
    version : int
        Its number at the end of the file's name.
    folder : str
        Where wheels for CUDA 12 put it, below ``nvidia``.
    cuda : int
        Major version of CUDA; from 13 on most wheels share the folder ``cu13``.
    """
    name = f"lib{stem}.so.{version}"
    for place in _folders(folder, cuda):
        if (place / name).is_file():
            yield str(place / name)
    yield name


def _folders(folder: str, cuda: int) -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        yield Path(root) / folder / "lib"
        yield Path(root) / f"cu{cuda}" / "lib"
    for prefix in (os.environ.get("CONDA_PREFIX"), sys.prefix):
        if prefix:
            yield Path(prefix) / "lib"
    places = homes()
    if nvcc := shutil.which("nvcc"):
        places.insert(-1, Path(nvcc).resolve().parents[1])
    for home in places:
        yield from (home / lib for lib in ("lib64", "lib"))
