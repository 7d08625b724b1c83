"""The description of a run from its configuration, and its data sets."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pydtnn.cli.config import TrainConfig, flags, read_axes
from pydtnn.cli.parts import find, require_parameter
from pydtnn.comm import Communicator
from pydtnn.data import Dataset, load_dataset, split_validation
from pydtnn.data.augment import create_augmentations
from pydtnn.data.loader import samples_of_step
from pydtnn.model.recompute_choice import AUTO
from pydtnn.optimizers import Optimizer
from pydtnn.parallel.mesh import SHARD, without_shard
from pydtnn.training.workload import Workload, names_of_fields
from pydtnn.utils import clock
from pydtnn.utils.registry import Factory
from pydtnn.utils.units import parse_quantity

_log = logging.getLogger("pydtnn.train")

DEFAULTS = {"momentum": 0.9, "weight_decay": 1e-4, "clip_norm": None}
"""Defaults of options that the user omits and for which the update rule has no default."""


def create_data(config: TrainConfig) -> tuple[Dataset, Dataset]:
    """Load the training set and the validation set: the test set, or a split of the former."""
    found, options = find(config, "dataset")
    for name, usual in (("image_size", None), ("skip_bad", False), ("exif_rotation", True)):
        if (value := getattr(config, name)) != usual:
            require_parameter(found, name, f"--dataset {name}")
            options = options | {name: value}
    train: Dataset
    train, test = load_dataset(found, config.data_dir, config.download, **options)
    if config.validation_split:
        train, test = split_validation(train, config.validation_split, config.seed)
    return train, test


def changes_of(config: TrainConfig) -> dict[str, Any]:
    """Return the arguments of a loader that change training samples."""
    return {"augment": create_augmentations(config.augment), "mix": config.mixings()}


def fetch_data(config: TrainConfig, comm: Communicator) -> None:
    """Download the data on one rank of each host, before all ranks read them."""
    if comm.local_rank == 0:
        create_data(config)


def share_data(config: TrainConfig, comm: Communicator) -> tuple[Dataset, Dataset]:
    """Load the data sets once for all ranks that are threads of this process.

    Collective: all ranks call it.
    """
    begin = clock.now()
    train, validation = comm.share(lambda: create_data(config))
    _log.debug("data %s: %.2f s", train.name, clock.now() - begin)
    return train, validation


def describe_data(config: TrainConfig, train: Dataset, ranks: int) -> dict[str, Any]:
    """Return the fields of a `Workload` that data determine.

    Parameters
    ----------
    config : TrainConfig
    train : Dataset
    ranks : int
        Ranks with other samples.
    """
    if train.classes is None:
        raise ValueError(
            f"train: --dataset: expected a data set with classes, got {train.name} without; train "
            "on it from Python, with a custom model"
        )
    return {
        "input_shape": train.input_shape,
        "classes": train.classes,
        "samples": len(train),
        "batch": samples_of_step(train, ranks, config.batch_size, config.global_batch_size),
    }


def describe_run(config: TrainConfig, axes: Mapping[str, int], data: Mapping[str, Any]) -> Workload:
    """Return the description of a run, from which trainer, virtual ranks and predictions are made.

    Fields with the name of an option have its value, unless it is a text that describes the value.

    Parameters
    ----------
    config : TrainConfig
    axes : mapping of str to int
        Ranks along each axis of the mesh.
    data : mapping
        See `describe_data`.
    """
    check_exchange(config)
    model, model_options = find(config, "model")
    rule, rule_options = find(config, "optimizer")
    same = [name for name in names_of_fields() if name in flags(TrainConfig)]
    converted = {
        "model": config.model if model.name in model.registry.entries else model.target,
        "model_options": model_options,
        "optimizer_options": {"lr": 0.01, **optimizer_numbers(config, rule), **rule_options},
        "freeze": tuple(names_in(config.freeze)),
        "tuning": config.tuning or ("fixed" if config.equal_bytes else None),
        **recomputation(config),
    }
    if (copies := without_shard(read_axes(config.parallel))[1]) is not None:
        converted["scheme_options"] = {"copies": copies, **config.scheme_options}
    return Workload(axes=axes, **{n: getattr(config, n) for n in same} | converted, **data)


def names_in(text: str) -> list[str]:
    """Return the names between commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def recomputation(config: TrainConfig) -> dict[str, Any]:
    """Return the fields of a `Workload` that `--recompute` and `--memory-limit` give."""
    given, size = config.recompute, config.memory_limit
    if given is None:  # a limit is that of --parallel auto
        return {"memory_limit": None}
    chosen = int(given) if given.isdecimal() else given if given == AUTO else tuple(names_in(given))
    limit = None if size is None else int(parse_quantity("train: --memory-limit", size, "B"))
    return {"recompute": chosen, "memory_limit": limit}


def optimizer_numbers(config: TrainConfig, found: Factory[Optimizer]) -> dict[str, Any]:
    """Return the arguments of an update rule that have options of their own, besides the rate."""
    numbers: dict[str, Any] = {}
    for name, ours in DEFAULTS.items():
        given, usual = getattr(config, name), found.takes.get(name)
        if given is not None:
            require_parameter(found, name, "--" + name.replace("_", "-"))
        if usual is not None:
            own = None if usual.default is usual.empty else usual.default
            numbers[name] = given if given is not None else own or ours
    return numbers


def check_exchange(config: TrainConfig) -> None:
    """Check the scheme that `--scheme` names, and its compression.

    Raises
    ------
    ValueError, TypeError
        If a name is unknown or options are incompatible.
    """
    found, _ = find(config, "scheme")
    if found.ready:  # an instance has its own communicator
        raise TypeError(f"scheme {found.name}: expected {found.registry.expected}, got an instance")
    if not config.overlap:
        require_parameter(found, "overlap", "--scheme overlap")
    if SHARD in read_axes(config.parallel):
        require_parameter(found, "copies", "--parallel shard")
    if config.exact or config.compress is not None:
        require_parameter(found, "sums", "--compress and --exact")
    if config.compress is not None:
        find(config, "compress")
