"""The frameworks that are compared: their packages, their adapters, and how ranks are started."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ADAPTERS = Path(__file__).parent / "adapters"


@dataclass(frozen=True)
class Framework:
    """A framework.

    Attributes
    ----------
    title : str
    adapter : str
        Name of the program in `adapters`; empty if it cannot run here.
    packages : tuple of str
        What its environment contains; empty: the environment of this program.
    environment : str
        Name of the environment, which several adapters can share.
    mpi : bool
        Whether mpirun starts its ranks.
    one_rank : bool
        Whether it runs on one rank.
    reason : str
        Why it cannot run here, with the versions that were tried.
    """

    title: str
    adapter: str = ""
    packages: tuple[str, ...] = ()
    environment: str = ""
    mpi: bool = False
    one_rank: bool = True
    reason: str = ""

    def ranks_of(self, ranks: Sequence[int]) -> list[int]:
        """Return the numbers of ranks on which it runs."""
        return [number for number in ranks if number > 1 or self.one_rank]

    @property
    def program(self) -> Path:
        """The adapter."""
        return ADAPTERS / f"{self.adapter}.py"

    def lines(self) -> int:
        """Return the lines of code of the adapter, without comments and empty ones."""
        lines = self.program.read_text().splitlines()
        return sum(bool(line.split("#")[0].strip()) for line in lines)


TORCH = ("torch==2.13.0", "numpy")

FRAMEWORKS = {
    "pydtnn": Framework("pydtnn", "ours", mpi=True),
    "torch_ddp": Framework("PyTorch DDP, gloo", "torch_ddp", TORCH, "torch"),
    "torch_fsdp": Framework("PyTorch FSDP2, gloo", "torch_fsdp", TORCH, "torch", one_rank=False),
    "jax": Framework("JAX, gloo", "jax_sharded", ("jax==0.10.2", "optax", "numpy"), "jax"),
    "keras": Framework(
        "Keras MultiWorkerMirrored", "keras_mirrored", ("tensorflow-cpu==2.21.0", "numpy"),
        "tensorflow",
    ),
}  # fmt: skip
"""Frameworks by name."""


def python_of(framework: Framework, root: Path) -> str:
    """Return the Python of a framework's environment, which is created if necessary."""
    if not framework.packages:
        return sys.executable
    folder = root / framework.environment
    ready, python = folder / "ready", folder / "bin" / "python"
    if not ready.exists():
        print(f"evaluation: installing {', '.join(framework.packages)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        install = [python, "-m", "pip", "install", "--quiet", *framework.packages]
        subprocess.run(install, check=True)
        ready.touch()
    return str(python)
