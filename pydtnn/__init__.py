"""Distributed training of neural networks: readable layers, fast kernels, any number of ranks.

Public names are imported on first use, so that ``import pydtnn`` is fast and requires neither MPI
nor a GPU.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydtnn.utils.version import __version__ as __version__

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
        model,
        optimizers,
        parallel,
        saving,
        schedules,
        tools,
        training,
    )
    from pydtnn.comm import create_communicator, run_threads
    from pydtnn.data import ArrayDataset, load_dataset
    from pydtnn.kernels import create_backend
    from pydtnn.layers import initializers
    from pydtnn.model import Model
    from pydtnn.parallel import Mesh
    from pydtnn.saving import load, weights
    from pydtnn.tools.interchange import from_torch
    from pydtnn.tools.runs import load_run
    from pydtnn.training import Trainer

__all__ = [
    "ArrayDataset",
    "Mesh",
    "Model",
    "Trainer",
    "callbacks",
    "comm",
    "create_backend",
    "create_communicator",
    "data",
    "from_torch",
    "initializers",
    "kernels",
    "layers",
    "load",
    "load_dataset",
    "load_run",
    "losses",
    "metrics",
    "model",
    "models",
    "optimizers",
    "parallel",
    "run_threads",
    "saving",
    "schedules",
    "tools",
    "training",
    "weights",
]

_HOMES = {
    "ArrayDataset": "pydtnn.data",
    "Model": "pydtnn.model",
    "Mesh": "pydtnn.parallel",
    "Trainer": "pydtnn.training",
    "create_backend": "pydtnn.kernels",
    "create_communicator": "pydtnn.comm",
    "from_torch": "pydtnn.tools.interchange",
    "initializers": "pydtnn.layers",
    "load": "pydtnn.saving",
    "load_dataset": "pydtnn.data",
    "load_run": "pydtnn.tools.runs",
    "run_threads": "pydtnn.comm",
    "weights": "pydtnn.saving",
}
"""Module of each public name; the others are modules themselves."""


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562) and cache it."""
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    elif name in (*__all__, "interchange", "runs", "testing"):  # the last by their former names
        value = import_module(f"pydtnn.{name}")
    else:
        value = import_module("pydtnn.utils.names").module_getattr("pydtnn")(name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _import_installed() -> None:
    """Replace this module, which belongs to a checkout, by the installed package.

    Python searches the current directory before the installed packages, so that ``python -m
    pydtnn.train`` in a checkout finds this folder. It has neither the models, which lie beside it
    and are installed as ``pydtnn.models``, nor compiled kernels. An editable installation (`make`)
    provides both, and is not affected.

    Raises
    ------
    ImportError
        If pydtnn is not installed.
    """
    for entry in sys.path:
        spec = PathFinder.find_spec(__name__, [entry])
        if spec is None or spec.loader is None or not spec.origin:
            continue
        if Path(spec.origin).with_name("models").is_dir():
            for name in [name for name in sys.modules if name.startswith(f"{__name__}.")]:
                del sys.modules[name]  # of the checkout, such as that of the version
            sys.modules[__name__] = module = module_from_spec(spec)  # `import` returns this one
            spec.loader.exec_module(module)
            return
    raise ImportError(
        f"pydtnn: the checkout {Path(__file__).parent.parent} is not installed; run `make setup` "
        "or `pip install .` in it"
    )


if find_spec("pydtnn.models") is None:
    _import_installed()
else:
    from pydtnn.utils.moved import install

    install()
