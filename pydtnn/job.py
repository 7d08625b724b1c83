"""From a configuration to the objects that carry it out."""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydtnn.callbacks import (
    BestWeights,
    Callback,
    Checkpointer,
    EarlyStopping,
    HistoryWriter,
    ProgressBar,
    ReduceOnPlateau,
    StopAtMetric,
)
from pydtnn.comm import Communicator
from pydtnn.comm.exchange import GradientExchange
from pydtnn.comm.schemes import create_scheme
from pydtnn.config import TrainConfig
from pydtnn.data import Dataset, Loader, load_dataset, split_validation
from pydtnn.data.augment import Augmentation, create_augmentations
from pydtnn.errors import describe
from pydtnn.kernels import create_backend
from pydtnn.losses import get_loss
from pydtnn.metrics import get_metric
from pydtnn.model import Model
from pydtnn.models import create_net
from pydtnn.optimizers import OPTIMIZERS, Optimizer, get_optimizer
from pydtnn.registry import create
from pydtnn.schedules import get_schedule
from pydtnn.suggest import unknown
from pydtnn.trainer import Trainer
from pydtnn.weights import load_weights


@dataclass
class Job:
    """A training run that is ready to start.

    Attributes
    ----------
    config : TrainConfig
    trainer : Trainer
    train, validation : Dataset
    global_batch_size : int
        Samples of all ranks per step.
    augment : tuple of Augmentation
    directory : Path
        Folder of the run.
    """

    config: TrainConfig
    trainer: Trainer
    train: Dataset
    validation: Dataset
    global_batch_size: int
    augment: tuple[Augmentation, ...]
    directory: Path


def create_job(config: TrainConfig, comm: Communicator, threads: int, directory: Path) -> Job:
    """Build data, model, optimizer, scheme, callbacks and trainer; nothing is communicated.

    Raises
    ------
    ValueError, TypeError, OSError
        In one sentence, for whatever the configuration asks that cannot be.
    """
    train, test = load_dataset(
        config.dataset,
        data_dir=config.data_dir,
        download=config.download,
        **config.dataset_options,
    )
    validation = test
    if config.validation_split:
        train, validation = split_validation(train, config.validation_split, config.seed)
    global_batch = config.global_batch_size or config.batch_size * comm.size
    augment = create_augmentations(config.augment)
    steps = len(  # the loader refuses whatever does not fit
        Loader(
            train,
            global_batch_size=global_batch,
            rank=comm.rank,
            size=comm.size,
            augment=augment,
            steps_per_epoch=config.steps_per_epoch,
        )
    )
    smoothing = {"label_smoothing": config.label_smoothing} if config.label_smoothing else {}
    model = Model(
        create_network(config, train),
        train.input_shape,
        backend=create_backend(config.backend, threads=threads),
        dtype=config.dtype,
        seed=config.seed,
        bucket_bytes=config.bucket_bytes,
    )
    trainer = Trainer(
        model,
        create_optimizer(config, global_batch, steps),
        loss=get_loss(config.loss, **smoothing),
        metrics=[get_metric(name) for name in names(config.metrics)],
        exchange=create_exchange(config, comm),
        callbacks=create_callbacks(config, directory),
        accumulation=config.accumulation,
    )
    if config.load:
        load_weights(model, config.load)
    return Job(config, trainer, train, validation, global_batch, augment, directory)


def create_network(config: TrainConfig, data: Dataset) -> Any:
    """Make the network that `--model` names, for the classes and shape of a data set."""
    if data.classes is None:
        raise ValueError(
            f"--dataset: {data.name} has no classes; train on it from Python with a model of your own"
        )
    if ":" not in config.model:
        return create_net(config.model, data.classes, data.input_shape, **config.model_options)
    factory = import_object(config.model, "--model")
    arguments = (data.classes, data.input_shape)
    return create("model", {"it": factory}, "it", config.model_options, args=arguments)


def create_optimizer(config: TrainConfig, global_batch: int, steps: int) -> Optimizer:
    """Make the optimizer with its schedule; `steps` is the length of an epoch."""
    kind = OPTIMIZERS.get(config.optimizer.lower())
    accepted = inspect.signature(kind).parameters if kind else {}
    lr = config.lr or (accepted["lr"].default if kind else 0.1)
    ratio = global_batch / config.lr_base_batch
    lr *= {"none": 1.0, "linear": ratio, "sqrt": ratio**0.5}[config.lr_scaling]
    schedule = get_schedule(
        config.schedule,
        lr,
        total_steps=steps * config.epochs,
        steps_per_epoch=steps,
        warmup_steps=round(config.warmup_epochs * steps),
        **config.schedule_options,
    )
    momentum = {"momentum": config.momentum} if "momentum" in accepted else {}
    return get_optimizer(
        config.optimizer,
        lr=schedule,
        weight_decay=config.weight_decay,
        clip_norm=config.clip_norm,
        **momentum | config.optimizer_options,
    )


def create_exchange(config: TrainConfig, comm: Communicator) -> GradientExchange:
    """Make the parallel scheme that `--scheme` names, or a file's class."""
    if ":" in config.scheme:
        return import_object(config.scheme, "--scheme")(comm)
    return create_scheme(config.scheme, comm, overlap=config.overlap)


def create_callbacks(config: TrainConfig, directory: Path) -> list[Callback]:
    """Make the callbacks; those that lower the learning rate or stop come before those that save."""
    callbacks: list[Callback] = [ProgressBar()]
    if config.plateau:
        callbacks.append(ReduceOnPlateau(config.monitor, config.plateau_factor, config.plateau))
    if config.early_stopping:
        callbacks.append(EarlyStopping(config.monitor, config.early_stopping))
    if config.stop_at is not None:
        callbacks.append(StopAtMetric(config.monitor, config.stop_at))
    callbacks.append(HistoryWriter(directory))
    callbacks.append(BestWeights(directory / "best.safetensors", config.monitor))
    if config.checkpoint_epochs or config.checkpoint_steps:
        callbacks.append(
            Checkpointer(
                directory,
                every_epochs=config.checkpoint_epochs or None,
                every_steps=config.checkpoint_steps,
                keep=config.keep,
            )
        )
    return callbacks


def names(text: str) -> list[str]:
    """Split "a, b" into its names."""
    return [name.strip() for name in text.split(",") if name.strip()]


def import_object(where: str, who: str) -> Any:
    """Import ``path/to/file.py:name``.

    Raises
    ------
    ValueError
        If there is no such file, it cannot be imported, or it has no such name.
    """
    path, _, name = where.rpartition(":")
    if not Path(path).is_file():
        raise ValueError(f"{who}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{who}: {path} is not a Python file; give path/to/file.py:name")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{who}: {path} cannot be imported: {describe(error)}") from error
    if not hasattr(module, name):
        own = [
            n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__
        ]
        raise ValueError(f"{who}: {unknown(f'name in {path}', name, own)}")
    return getattr(module, name)
