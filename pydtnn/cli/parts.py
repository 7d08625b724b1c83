"""Table of the options that name objects, and the lookup of these objects."""

from __future__ import annotations

from typing import Any

from pydtnn.cli.config import TrainConfig, flags
from pydtnn.comm.schedules.rule import ALLREDUCE
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

TAKEN = {
    "model": ("classes", "input_shape"),
    "dataset": ("name", "data_dir", "download"),
    "loss": ("label_smoothing",),
    "optimizer": ("lr", "momentum", "weight_decay", "clip_norm"),
    "schedule": ("schedule", "lr", "total_steps", "steps_per_epoch", "warmup_steps"),
    "scheme": ("comm", "sums", "overlap"),
}
"""Arguments that are no further options of a named thing: the run, or another option, sets them."""


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
    for name in TAKEN.get(part, ()):
        if name in options:
            own = flags(TrainConfig).get(name)
            advice = "omit it, as the run sets it" if own is None else f"use {own.label}"
            raise ValueError(f"train: --{part}: {name} is not one of its options; {advice}")
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
