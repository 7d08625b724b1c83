"""Distributed training of neural networks: readable layers, fast kernels, any number of ranks.

Public names are imported on first use, so that ``import pydtnn`` is fast and requires neither MPI
nor a GPU.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    import pydtnn.models as models
    from pydtnn import (
        callbacks,
        comm,
        data,
        kernels,
        layers,
        losses,
        metrics,
        optimizers,
        parallel,
        schedules,
        testing,
        training,
        weights,
    )
    from pydtnn.comm import create_communicator, run_threads
    from pydtnn.data import ArrayDataset, load_dataset
    from pydtnn.kernels import create_backend
    from pydtnn.layers import initializers
    from pydtnn.model import Model
    from pydtnn.saving import load
    from pydtnn.training import Trainer

__all__ = [
    "ArrayDataset",
    "Model",
    "Trainer",
    "callbacks",
    "comm",
    "create_backend",
    "create_communicator",
    "data",
    "initializers",
    "kernels",
    "layers",
    "load",
    "load_dataset",
    "losses",
    "metrics",
    "models",
    "optimizers",
    "parallel",
    "run_threads",
    "schedules",
    "testing",
    "training",
    "weights",
]

_HOMES = {
    "ArrayDataset": "pydtnn.data",
    "Model": "pydtnn.model",
    "Trainer": "pydtnn.training",
    "create_backend": "pydtnn.kernels",
    "create_communicator": "pydtnn.comm",
    "initializers": "pydtnn.layers",
    "load": "pydtnn.saving",
    "load_dataset": "pydtnn.data",
    "run_threads": "pydtnn.comm",
}
"""Module of each public name; the others are modules themselves."""


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562) and cache it."""
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    elif name in __all__:
        value = import_module(f"pydtnn.{name}")
    else:
        value = import_module("pydtnn.utils.guess").answering("pydtnn")(name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
