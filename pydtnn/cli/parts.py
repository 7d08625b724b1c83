"""Table of the options that name objects, and the lookup of these objects."""

from __future__ import annotations

from typing import Any

from pydtnn.cli.config import TrainConfig
from pydtnn.comm.schedules.auto import ALLREDUCE
from pydtnn.data.augment import AUGMENTATION
from pydtnn.data.named import DATASET
from pydtnn.losses.functions import LOSS
from pydtnn.metrics import METRIC
from pydtnn.models import MODEL
from pydtnn.optimizers import OPTIMIZER
from pydtnn.parallel.compression import COMPRESSOR
from pydtnn.parallel.schemes import SCHEME
from pydtnn.schedules.named import SCHEDULE
from pydtnn.utils.names import shorten
from pydtnn.utils.registry import Factory, Registry

PARTS: dict[str, Registry[Any]] = {
    "model": MODEL,
    "dataset": DATASET,
    "augment": AUGMENTATION,
    "loss": LOSS,
    "metrics": METRIC,
    "optimizer": OPTIMIZER,
    "schedule": SCHEDULE,
    "scheme": SCHEME,
    "compress": COMPRESSOR,
    "allreduce": ALLREDUCE,
}
"""The kind of object that each option names, in the order of the help page."""

ELSEWHERE = {
    "model": {"classes": "the data set", "input_shape": "the data set"},
    "dataset": {"name": "--dataset", "data_dir": "--data-dir", "download": "--download"},
    "loss": {"label_smoothing": "--loss NAME:label_smoothing=X"},
    "optimizer": {
        "lr": "--lr",
        "momentum": "--momentum",
        "weight_decay": "--weight-decay",
        "clip_norm": "--clip-norm",
    },
    "schedule": {
        "schedule": "--schedule",
        "lr": "--lr",
        "total_steps": "--epochs",
        "steps_per_epoch": "--steps-per-epoch",
        "warmup_steps": "--warmup-epochs",
    },
    "scheme": {
        "comm": "mpirun",
        "sums": "--compress or --exact",
        "overlap": "--scheme NAME:overlap=false",
    },
}
"""Options that set the arguments which are not accepted in ``--...-options``."""


def find(config: TrainConfig, part: str) -> tuple[Factory[Any], dict[str, Any]]:
    """Return the object or factory that an option names, and the arguments to construct it.

    Parameters
    ----------
    config : TrainConfig
    part : str
        A key of `PARTS`.

    Raises
    ------
    TypeError, ValueError
        If the name is unknown, or an argument is set by another option.
    """
    options: dict[str, Any] = getattr(config, f"{part}_options", {})
    for name, flag in ELSEWHERE.get(part, {}).items():
        if name in options:
            raise ValueError(f"train: --{part}: {name} is not one of its options; use {flag}")
    try:
        return PARTS[part].find(getattr(config, part)), options
    except (TypeError, ValueError) as error:
        raise type(error)(f"train: {error}") from error


def require_parameter(found: Factory[Any], name: str, flag: str) -> None:
    """Raise ValueError if a flag has no effect because `found` has no such parameter."""
    if name not in found.takes:
        others = [key for key in found.registry.entries if name in found.registry.find(key).takes]
        raise ValueError(
            f"train: {flag}: {found.name} has no parameter `{name}`; omit it or use "
            f"{shorten(others, 3)}"
        )
