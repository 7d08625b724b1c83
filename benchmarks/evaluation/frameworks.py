"""The frameworks that are compared: their packages, their adapters, and how ranks are started."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ADAPTERS = Path(__file__).parent / "adapters"


@dataclass(frozen=True)
class Framework:
    """A framework.

    Attributes
    ----------
    title : str
    adapter : str
        Name of the program in `adapters`.
    packages : tuple of str
        What its environment contains; empty: one made by hand, or that of this program.
    compiled : str
        A package that is compiled in the environment with its other packages.
    variables : tuple of str
        Environment variables of that, such as ``WITH_MPI=1``.
    environment : str
        Name of the environment, which several adapters can share.
    mpi : bool
        Whether mpirun starts its ranks.
    python : str
        The Python of its environment; empty: that of this program.
    one_rank : bool
        Whether it runs on one rank.
    slower : float
        Time that is added to each step, as a share of it: a slow-down that must be found.
    """

    title: str
    adapter: str
    packages: tuple[str, ...] = ()
    environment: str = ""
    compiled: str = ""
    variables: tuple[str, ...] = ()
    mpi: bool = False
    python: str = ""
    one_rank: bool = True
    slower: float = 0.0

    def runs_on(self, ranks: int) -> bool:
        """Return whether it runs on a number of ranks."""
        return ranks > 1 or self.one_rank

    @property
    def reason(self) -> str:
        """Why pip cannot make its environment: the end of the docstring of its adapter."""
        text = ast.get_docstring(ast.parse(self.program.read_text())) or ""
        by_hand = self.environment and not self.packages
        return " ".join(text.split("\n\n")[-1].split()) if by_hand else ""

    @property
    def program(self) -> Path:
        """The adapter."""
        return ADAPTERS / f"{self.adapter}.py"

    def lines(self) -> int:
        """Return the lines of code of the adapter, without comments and empty ones."""
        lines = self.program.read_text().splitlines()
        return sum(bool(line.split("#")[0].strip()) for line in lines)


TORCH = ("torch==2.13.0", "deepspeed==0.19.8", "torchft==0.2.0", "numpy")
HOROVOD = ("mpich", "cmake<3.30", "wheel", "cffi", "cloudpickle", "packaging", "psutil", "pyyaml")
HOROVOD_BUILD = ("HOROVOD_WITHOUT_MXNET=1", "HOROVOD_WITH_MPI=1", "HOROVOD_WITHOUT_GLOO=1")
TENSORFLOW = ("tensorflow-cpu==2.21.0", "numpy")

FRAMEWORKS = {
    "pydtnn": Framework("pydtnn", "ours", mpi=True),
    "pydtnn_twin": Framework("pydtnn, twin", "ours", mpi=True),
    "pydtnn_slower": Framework("pydtnn, 3 % slower", "ours", mpi=True, slower=0.03),
    "pydtnn_predicted": Framework("pydtnn, predicted", "ours_predicted", mpi=True),
    "torch_ddp": Framework("PyTorch DDP, gloo", "torch_ddp", TORCH, "torch"),
    "torch_fsdp": Framework("PyTorch FSDP2, gloo", "torch_fsdp", TORCH, "torch", one_rank=False),
    "pydtnn_uji": Framework(
        "PyDTNN (UJI)", "pydtnn_uji", ("pydtnn[mpi-mpi4py]==3.11.0", "mpich"), "pydtnn_uji",
        mpi=True, python="python3.13",
    ),
    "deepspeed": Framework("DeepSpeed ZeRO 1, gloo", "torch_deepspeed", TORCH, "torch"),
    "torchft": Framework("torchft, gloo", "torch_ft", TORCH, "torch"),
    "jax": Framework("JAX, gloo", "jax_sharded", ("jax==0.10.2", "optax", "numpy"), "jax"),
    "keras": Framework(
        "Keras MultiWorkerMirrored", "keras_mirrored", TENSORFLOW, "tensorflow"
    ),
    "tensorflow": Framework(
        "TensorFlow without Keras", "tensorflow_plain", TENSORFLOW, "tensorflow"
    ),
    "horovod": Framework(
        "Horovod, Keras, MPI", "horovod_keras",
        ("tensorflow-cpu==2.13.1", "numpy<1.25", "setuptools<70", *HOROVOD), "horovod",
        "horovod==0.28.1",
        ("HOROVOD_WITH_TENSORFLOW=1", "HOROVOD_WITHOUT_PYTORCH=1", *HOROVOD_BUILD),
        mpi=True,
    ),
    "horovod_torch": Framework(
        "Horovod, PyTorch, MPI", "horovod_torch",
        ("torch==2.13.0", "numpy", "setuptools>=77,<81", *HOROVOD), "horovod_torch",
        "horovod==0.28.1",
        # Its build asks for C++14 after all other options, PyTorch for C++17.
        ("HOROVOD_WITHOUT_TENSORFLOW=1", "HOROVOD_WITH_PYTORCH=1", *HOROVOD_BUILD,
         'CMAKE_CXX_COMPILER_LAUNCHER=sh;-c;"$0" "$@" -std=gnu++17'),
        mpi=True,
    ),
    "mxnet": Framework(
        "MXNet, dist_sync", "mxnet_gluon", ("mxnet==1.9.1", "numpy<1.24"), "mxnet",
        python="python3.11",
    ),
    "paddle": Framework(
        "PaddlePaddle, gloo", "paddle_parallel", ("paddlepaddle==3.3.1", "numpy"), "paddle"
    ),
    "chainermn": Framework(
        "ChainerMN, MPI", "chainer_mn",
        ("numpy<1.24", "mpi4py", "mpich", "setuptools<70", "wheel"), "chainer", "chainer==7.8.1",
        mpi=True, python="python3.11",
    ),
    "tarantella": Framework(
        "Tarantella, GASPI", "tarantella_keras", environment="tarantella"
    ),
    "lbann": Framework("LBANN, MPI", "lbann_layers", environment="lbann", mpi=True),
}  # fmt: skip
"""Frameworks by name."""

COSTS = {
    "torch": (1000, 4), "tensorflow": (1500, 4), "jax": (700, 2), "pydtnn_uji": (300, 2),
    "horovod": (1300, 15), "horovod_torch": (1100, 15), "mxnet": (300, 2), "paddle": (900, 2),
    "chainer": (160, 2),
}  # fmt: skip
"""Of an environment: about how many MB it has on disk, and how many minutes installing it takes."""


def missing(names: Iterable[str], root: Path) -> dict[Path, tuple[str, ...]]:
    """Return the environments of frameworks that do not exist yet, with their packages."""
    own = [FRAMEWORKS[name] for name in names]
    return {
        root / one.environment: (*one.packages, *filter(None, [one.compiled]))
        for one in own
        if one.packages and not (root / one.environment / "ready").exists()
    }


def interpreter(name: str) -> str | None:
    """Return the first interpreter of a name in PATH that starts: shims of absent ones do not."""
    found = (shutil.which(name, path=folder) for folder in os.get_exec_path())
    starts = (one for one in found if one and not _run([one, "-c", ""]).returncode)
    return next(starts, None)


def python_of(name: str, root: Path) -> str:
    """Return the Python of a framework's environment, which is created if necessary.

    Raises
    ------
    ValueError
        If its Python is missing, or its packages cannot be installed.
    """
    framework = FRAMEWORKS[name]
    folder = root / framework.environment
    ready, python = folder / "ready", folder / "bin" / "python"
    if not framework.packages:
        return str(python) if python.exists() else sys.executable
    if not ready.exists():
        base = interpreter(framework.python or sys.executable)
        if base is None:
            raise ValueError(
                f"{name}: expected {framework.python}, got none; install it, or leave {name} out"
            )
        [packages] = missing([name], root).values()
        print(f"evaluation: installing {', '.join(packages)}", flush=True)
        install = [python, "-m", "pip", "install", "--quiet"]
        commands = [[base, "-m", "venv", folder], [*install, *framework.packages]]
        if framework.compiled:  # a wheel in pip's cache may be compiled with other variables
            anew = [*install, "--no-build-isolation", "--no-cache-dir"]
            commands.append([*anew, framework.compiled])
        paths = os.pathsep.join([str(python.parent.absolute()), os.environ["PATH"]])
        variables = dict(one.split("=", 1) for one in framework.variables)
        for command in commands:
            done = _run(command, env={**os.environ, **variables, "PATH": paths})
            if done.returncode:
                last = done.stderr.strip().splitlines() or ["no message"]
                raise ValueError(f"{name}: its packages cannot be installed: {last[-1]}")
        ready.touch()
    return str(python)


def _run(command: Sequence[str | Path], **given: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, **given)
