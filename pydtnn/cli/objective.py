"""Losses and metrics of a run from its configuration."""

from __future__ import annotations

import numpy as np

from pydtnn.cli.config import TrainConfig
from pydtnn.cli.parts import find, require_parameter
from pydtnn.data import Dataset, balanced_weights
from pydtnn.losses import Loss
from pydtnn.metrics import Metric
from pydtnn.model import Model
from pydtnn.training.objective import check_metrics, metrics_of
from pydtnn.utils.suggest import unknown

BALANCED = "balanced"
"""Value of `class_weights` in `--loss-options` for weights of the training set."""


def create_loss(config: TrainConfig, train: Dataset) -> Loss:
    """Create the loss that `--loss` names; "balanced" weights are those of the training set."""
    found, options = find(config, "loss")
    if options.get("class_weights") == BALANCED:
        options = options | {"class_weights": balanced_weights(train)}
    if config.label_smoothing:
        require_parameter(found, "label_smoothing", "--label-smoothing")
        options = options | {"label_smoothing": config.label_smoothing}
    return found.make(options)


def create_metrics(config: TrainConfig, loss: Loss) -> list[Metric]:
    """Create the metrics that `--metrics` lists, by default those of the loss."""
    if config.metrics is None:
        return metrics_of(loss, None)
    return metrics_of(loss, [name.strip() for name in config.metrics.split(",") if name.strip()])


def choose_monitor(config: TrainConfig, metrics: list[Metric]) -> str:
    """Return the name of the value to monitor: by default the first validation metric or loss."""
    names = [*(metric.name for metric in metrics), "loss"]
    choices = [*(f"val_{name}" for name in names), *names]
    if config.monitor is not None and config.monitor not in choices:
        raise ValueError(f"train: {unknown('value of --monitor', config.monitor, choices)}")
    return config.monitor or choices[0]


def read_auxiliary_weights(text: str) -> list[float] | None:
    """Return the numbers of `--auxiliary-weights`, or None if there are none.

    Raises
    ------
    ValueError
        If the text is not a list of numbers.
    """
    try:
        return [float(item) for item in text.split(",")] if text.strip() else None
    except ValueError:
        raise ValueError(
            f"train: --auxiliary-weights must be numbers such as 0.3,0.3, got {text!r}"
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
            f"train: --auxiliary-weights must be {others} numbers, one for each output of the "
            f"model after the first, got {auxiliary}"
            if others
            else f"train: --auxiliary-weights: the model has no auxiliary outputs, got {auxiliary}"
        )
    shape = (1, *model.output_shapes[0])
    classes = data.classes or 1
    target = np.eye(classes)[-1:] if mixed else np.full((1, *_positions(data)), classes - 1)
    loss.check(shape, target)
    check_metrics(metrics, shape, target)


def _positions(data: Dataset) -> tuple[int, ...]:
    """Return the shape of the labels of a sample: ``(T,)`` for sequences, usually ``()``."""
    _, y = data.read(np.arange(1))
    return () if data.classes is None else np.shape(y)[1:]
