"""Construction of the objects of a run from its configuration."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pydtnn import callbacks as library
from pydtnn import data as datasets
from pydtnn.cli.config import TrainConfig
from pydtnn.cli.parts import find, require_parameter
from pydtnn.cli.run_directory import RunFolder
from pydtnn.cli.step_meter import StepMeter
from pydtnn.cli.workload import (
    changes_of,
    describe_data,
    describe_run,
    names_in,
    optimizer_numbers,
    share_data,
)
from pydtnn.comm import Communicator
from pydtnn.data import Dataset, Loader
from pydtnn.data.inputs import check_same, same_normalization
from pydtnn.losses import Loss
from pydtnn.metrics import Metric
from pydtnn.model import Model
from pydtnn.optimizers import Optimizer
from pydtnn.parallel.mesh import Mesh
from pydtnn.saving import check_saveable
from pydtnn.saving.weights import load_weights
from pydtnn.schedules import Schedule, get_schedule
from pydtnn.training.callback import Callback
from pydtnn.training.capabilities import why_not
from pydtnn.training.objective import check_metrics, metrics_of
from pydtnn.training.run_folder import find_inputs
from pydtnn.training.trainer import Trainer
from pydtnn.training.workload import Workload
from pydtnn.utils import clock
from pydtnn.utils.names import unknown
from pydtnn.utils.tools import find_tool

BALANCED = "balanced"
"""Value of `class_weights` in options of the loss for weights of the training set."""


def create_loss(config: TrainConfig, train: Dataset) -> Loss:
    """Create the loss that `--loss` names; "balanced" weights are those of the training set.

    Targets without a class, if the training set has some, are left out.
    """
    found, options = find(config, "loss")
    if train.ignore_index is not None and "ignore_index" in found.takes:
        options = {"ignore_index": train.ignore_index} | options
    if options.get("class_weights") == BALANCED:
        options = options | {"class_weights": datasets.balanced_weights(train)}
    if train.ignore_index is not None and "ignore_index" in found.takes:
        options = {"ignore_index": train.ignore_index, **options}
    if config.label_smoothing:
        require_parameter(found, "label_smoothing", "--loss label_smoothing")
        options = options | {"label_smoothing": config.label_smoothing}
    return found.make(options)


def create_metrics(config: TrainConfig, loss: Loss) -> list[Metric]:
    """Create the metrics that `--metrics` lists, by default those of the loss."""
    if config.metrics is None:
        return metrics_of(loss, None)
    return metrics_of(loss, names_in(config.metrics))


def choose_monitor(config: TrainConfig, metrics: list[Metric]) -> str:
    """Return the name of the value to monitor: by default the first validation metric or loss."""
    names = [*(metric.name for metric in metrics if metric.better), "loss"]
    choices = [*(f"val_{name}" for name in names), *names]
    if config.monitor is not None and config.monitor not in choices:
        raise ValueError(f"train: {unknown('value of --monitor', config.monitor, choices)}")
    return config.monitor or choices[0]


def read_auxiliary_weights(text: str) -> list[float] | None:
    """Return the numbers of `auxiliary_weights`, or None if there are none.

    Raises
    ------
    ValueError
        If the text is not a list of numbers.
    """
    try:
        return [float(item) for item in text.split(",")] if text.strip() else None
    except ValueError:
        raise ValueError(
            f"train: --loss auxiliary_weights must be numbers such as 0.3,0.3, got {text!r}"
        ) from None


def check_model(
    model: Model,
    data: Dataset,
    loss: Loss,
    metrics: list[Metric],
    auxiliary: list[float] | None,
    *,
    mixed: bool = False,
) -> None:
    """Raise an error if the model has no parameters or its outputs do not fit loss or metrics.

    Loss and metrics are checked with the shape of the first output and the last class as target, or
    its probabilities if samples are mixed.
    """
    if not model.parameters:
        raise ValueError(
            "train: --model: the model has no parameters to train; add a Linear or a Conv2d"
        )
    others = len(model.output_shapes) - 1
    if len(auxiliary or ()) != others:
        raise ValueError(
            f"train: --loss auxiliary_weights must be {others} numbers, one for each output of the "
            f"model after the first, got {auxiliary}"
            if others
            else f"train: --loss auxiliary_weights: the model has one output, got {auxiliary}"
        )
    shape = (1, *model.output_shapes[0])
    classes = data.classes or 1
    positions = _positions(data)
    mixed = mixed and not positions  # mixed masks remain labels
    target = np.eye(classes)[-1:] if mixed else np.full((1, *positions), classes - 1)
    loss.check(shape, target)
    check_metrics(metrics, shape, target)


def _positions(data: Dataset) -> tuple[int, ...]:
    """Return the shape of the labels of a sample: ``(T,)`` for sequences, usually ``()``."""
    _, y = data.read(np.arange(1))
    return () if data.classes is None else np.shape(y)[1:]


_log = logging.getLogger("pydtnn.train")

LOAD_OPTIONS = ("strict", "rename")
"""Arguments of `load_weights` that `--load` accepts."""


@dataclass
class Job:
    """A training run that is ready to start.

    Attributes
    ----------
    config : TrainConfig
    work : Workload
        What the run trains, and how its ranks share it.
    trainer : Trainer
    train, validation : Dataset
    steps_per_epoch : int
    directory : Path
        Folder of the run.
    loaded : LoadReport, StateDictReport or None
        The arrays that `--load` has loaded, if any.
    recorder : Recorder or None
        The observer of `--trace`, if it is set.
    meter : StepMeter or None
        Times of steps, and growth of this process since the model was built.
    predicted : object, optional
        Time and memory of a step by the performance model, on rank 0: a dataclass with `rows`.
    sent_before : int
        Bytes that this rank has sent to measure messages, before training.
    survival : Survival or None
        The attempts of this run, with `--survive`.
    about : dict
        Content of run.json, on rank 0.
    """

    config: TrainConfig
    work: Workload
    trainer: Trainer
    train: Dataset
    validation: Dataset
    steps_per_epoch: int
    directory: Path
    loaded: Any = None
    recorder: Any = None
    meter: StepMeter | None = None
    predicted: Any = None
    sent_before: int = 0
    survival: Any = None
    about: dict[str, Any] = field(default_factory=dict)


class RunParts(NamedTuple):
    """What a configuration and a training set determine, before there is a model."""

    work: Workload
    steps: int
    loss: Loss
    metrics: list[Metric]
    auxiliary: list[float] | None
    monitor: str


def create_parts(
    config: TrainConfig, train: Dataset, axes: Mapping[str, int], group: Communicator, ranks: int
) -> RunParts:
    """Create the parts of a run of a mesh with these axes, whose ranks have parts of a batch.

    Raises
    ------
    ValueError, TypeError, OSError
        If the configuration cannot be satisfied.
    """
    work = describe_run(config, axes, describe_data(config, train, ranks))
    if config.virtual_ranks and work.tuning is None:
        work = replace(work, tuning="fixed")  # the same results in every repetition
    steps = len(  # the loader raises ValueError for inconsistent sizes
        Loader(
            train,
            global_batch_size=work.batch,
            rank=group.rank,
            size=group.size,
            **changes_of(config),
            steps_per_epoch=config.steps_per_epoch,
            drop_last=config.drop_last,
            shards=config.shards if config.exact else None,
        )
    )
    loss = create_loss(config, train)
    metrics = create_metrics(config, loss)
    auxiliary = read_auxiliary_weights(config.auxiliary_weights)
    monitor = choose_monitor(config, metrics)
    return RunParts(work, steps, loss, metrics, auxiliary, monitor)


def create_job(
    config: TrainConfig,
    comm: Communicator,
    threads: int,
    directory: Path,
    mesh: Mesh | None = None,
    data: tuple[Dataset, Dataset] | None = None,
    survival: Any = None,
) -> Job:
    """Build data, model, optimizer, scheme, callbacks and trainer; nothing is communicated.

    Parameters
    ----------
    data : (Dataset, Dataset), optional
        Training and validation set, if they are loaded already.
    survival : Survival, optional
        Another callback; callbacks, times and predictions are those of its job, if there is one.

    Raises
    ------
    ValueError, TypeError, OSError
        If the configuration cannot be satisfied.
    """
    group = comm if mesh is None else mesh.data
    train, validation = data or share_data(config, comm)
    axes = {"data": comm.size} if mesh is None else mesh.shape
    ranks = group.size if survival is None else survival.parts
    parts, meter = create_parts(config, train, axes, group, ranks), StepMeter()
    model = create_model(config, parts, train, threads, mesh)
    exchange = parts.work.create_exchange(group)
    optimizer = create_optimizer(config, parts.work.batch, parts.steps)
    before = None
    if survival is not None:
        optimizer.needs_all_gradients = True  # see `pydtnn.tools.survival.recovery`
        before = survival.job
    if before is None:
        callbacks = create_callbacks(config, comm, directory, parts, meter)
        recorder = None
        if config.trace is not None:
            recorder = find_tool("tracing").recorder_of(config)
        callbacks = callbacks if survival is None else [survival, *callbacks]
    else:
        callbacks, recorder = before.trainer.callbacks, before.recorder
        meter = before.meter or meter
    trainer = Trainer(
        model,
        optimizer,
        loss=parts.loss,
        metrics=parts.metrics,
        auxiliary_weights=parts.auxiliary,
        exchange=exchange,
        callbacks=callbacks,
        observers=[*filter(None, [recorder])],
        **parts.work.trainer_options(),
        graph=config.graph,
        check_equal=config.check_equal,
        progress="none" if config.quiet else config.progress,
    )
    if (config.save and not config.saves_weights) or config.mlflow or config.wandb:
        model.inputs = trainer.objective.describe(train)  # also if it is only evaluated
    for feature in () if survival is None else survival.features:
        if why := why_not(feature, trainer.setup):
            raise ValueError(f"train: --survive: {why}")
    loaded = load_initial_weights(config, model, train)
    if loaded is not None:
        _log.debug("%s from %s", loaded, config.load)
    data, work, steps = (train, validation), parts.work, parts.steps
    job = Job(config, work, trainer, *data, steps, directory, loaded, recorder, meter)
    job.survival = survival
    if before is not None:
        job.predicted, job.sent_before = before.predicted, before.sent_before
        job.about, trainer.seconds = before.about, before.trainer.seconds
    return job


def create_model(
    config: TrainConfig, parts: RunParts, train: Dataset, threads: int, mesh: Mesh | None
) -> Model:
    """Create the model and check that it can be trained with these parts, and saved."""
    work, begin = parts.work, clock.now()
    backend = work.create_backend(threads=threads, tf32=config.tf32)
    model = work.create_model(work.create_net(), backend, mesh)
    _log.debug("model %s: %.2f s", config.model, clock.now() - begin)
    mixed = bool(config.mixings())
    check_model(model, train, parts.loss, parts.metrics, parts.auxiliary, mixed=mixed)
    freeze(config, work, model)
    if config.save and not config.saves_weights:
        check_saveable(model)
    return model


def load_initial_weights(config: TrainConfig, model: Model, train: Dataset) -> Any:
    """Load the weights that `--load` names, with its options.

    If it is known which samples they were trained on, those of the training set must be alike.
    """
    if not config.load:
        return None
    for name in config.load_options:
        if name not in LOAD_OPTIONS:
            raise ValueError(f"train: {unknown('option of --load', name, LOAD_OPTIONS)}")
    strict = config.load_options.get("strict", True)  # otherwise layers may be for other classes
    known = find_inputs(Path(config.load)) if strict else None
    if known is not None:
        advice = (
            "use the same classes in the same order, the same size and tokenizer, or train others "
            "from these weights with --load FILE:strict=false"
        )
        check_same("train: --load", train, known, f"the training of {config.load}", advice)
    tool = find_tool("state_dicts")
    foreign = tool is not None and tool.is_state_dict(config.load)
    read = tool.load_state_dict if foreign else load_weights
    report = read(model, config.load, **config.load_options)
    if known is not None and config.evaluate_only:
        model.inputs = known
    elif known is not None and not same_normalization(train, known):
        _log.warning("mean and deviation of %s are not those of %s", train.name, config.load)
    return report


def freeze(config: TrainConfig, work: Workload, model: Model) -> None:
    """Freeze the layers that `--freeze` lists.

    Raises
    ------
    ValueError
        If a name matches no layer, or nothing remains to be trained.
    """
    if not work.freeze:
        return
    try:
        model.freeze(*work.freeze)
    except ValueError as error:
        raise ValueError(f"train: --freeze: {str(error).partition(': ')[2]}") from error
    if not model.buckets and not config.evaluate_only:
        raise ValueError(
            f"train: --freeze: {config.freeze} leaves no parameters to train; freeze fewer"
        )


def create_optimizer(config: TrainConfig, global_batch: int, steps: int) -> Optimizer:
    """Create the optimizer with its schedule; `steps` is the length of an epoch."""
    found, options = find(config, "optimizer")
    usual = {name: None if p.default is p.empty else p.default for name, p in found.takes.items()}
    if "lr" not in usual:
        raise ValueError(
            f"train: --optimizer: {config.optimizer} must have a parameter `lr`; add it"
        )
    lr = create_schedule(config, usual["lr"], global_batch, steps)
    return found.make(options, lr=lr, **optimizer_numbers(config, found))


def create_schedule(config: TrainConfig, usual: Any, global_batch: int, steps: int) -> Schedule:
    """Create the schedule that `--schedule` names; `usual` is the update rule's default rate."""
    lr = usual if config.lr is None else config.lr
    found, options = find(config, "schedule")
    if found.ready:
        lr = 0.0
        for flag, given in (
            ("--lr", config.lr is not None),
            ("--lr-scaling", config.lr_scaling != "none"),
        ):
            if given:
                raise ValueError(
                    f"train: {flag}: {config.schedule} sets the learning rate; omit {flag}"
                )
    elif not isinstance(lr, Real):
        raise ValueError(f"train: --lr: {config.optimizer} has no default learning rate; set --lr")
    ratio = global_batch / config.lr_base_batch
    scale = {"none": 1.0, "linear": ratio, "sqrt": ratio**0.5}[config.lr_scaling]
    return get_schedule(
        found,
        scale * lr,
        total_steps=steps * config.epochs,
        steps_per_epoch=steps,
        warmup_steps=round(config.warmup_epochs * steps),
        **options,
    )


def create_callbacks(
    config: TrainConfig, comm: Communicator, directory: Path, parts: RunParts, meter: StepMeter
) -> list[Callback]:
    """Create the callbacks; the one that saves the state of the others follows them."""
    averages = list[Callback]()
    if config.ema is not None:
        averages.append(library.ExponentialMovingAverage(config.ema))
    if config.mirrored or config.moved:
        averages.append(library.MirroredEvaluation(config.moved))
    if config.evaluate_only:
        return [meter, *averages]
    monitor, callbacks = parts.monitor, list[Callback]([meter])
    if comm.size > 1 and config.straggler_factor:
        callbacks.append(library.SlowRanks(config.straggler_factor))
    callbacks += [*averages, RunFolder(directory)]
    if config.teacher is not None:
        callbacks.append(library.Teacher(config.teacher, config.temperature, config.teacher_weight))
    if config.verify_steps is not None:
        tool = find_tool("verification", "train: --verify-steps")
        callbacks.append(tool.Verification(config.verify_steps, config.survive and tool.leave))
    if config.plateau:
        # `plateau` counts the epochs until the reduction: one more than the patience
        callbacks.append(
            library.ReduceOnPlateau(monitor, config.plateau_factor, config.plateau - 1)
        )
    if config.early_stopping:
        callbacks.append(library.EarlyStopping(monitor, config.early_stopping))
    if config.stop_at is not None:
        callbacks.append(library.StopAtMetric(monitor, config.stop_at))
    callbacks.append(library.HistoryWriter(directory))
    if (measurements := find_tool("measurements")) is not None:
        callbacks.append(measurements.MeasurementWriter(directory, meter))
    if config.tensorboard or config.mlflow is not None or config.wandb is not None:
        tool = find_tool("trackers", "train: --tensorboard, --mlflow or --wandb")
        callbacks += tool.create_trackers(config, directory)
    best = directory / "best.safetensors"
    callbacks.append(library.BestWeights(best, monitor, restore_best=config.restore_best))
    if config.checkpoint_epochs or config.checkpoint_steps or config.checkpoint_every:
        callbacks.append(
            library.Checkpointer(
                directory,
                every_epochs=config.checkpoint_epochs or None,
                every_steps=config.checkpoint_steps,
                every=config.checkpoint_every,
                keep=config.keep,
                background=config.checkpoint_background,
                mtbf=config.mtbf,
                config=config.course(),
            )
        )
    return callbacks
