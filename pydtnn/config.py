"""The configuration of a training run; the command line is derived from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal

GROUPS = ("model and data", "training", "optimizer", "ranks and device", "output")


def _option(group: str, default: Any, help: str) -> Any:
    """Declare an option: its group on the help page, its default and its line of help."""
    assert group in GROUPS
    metadata = {"group": group, "help": help}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class TrainConfig:
    """Everything that a training run is told; defaults train ResNet-44 on embedded data in minutes."""

    model: str = _option(
        "model and data", "resnet44", "name of a model, or path/to/file.py:function"
    )
    model_options: dict[str, Any] = _option(
        "model and data", {}, 'options of the model, as {"shortcut": "A"}'
    )
    dataset: str = _option("model and data", "synthetic", "name of a data set")
    dataset_options: dict[str, Any] = _option(
        "model and data", {}, 'options of the data set, as {"samples": 20000}'
    )
    data_dir: str | None = _option(
        "model and data",
        None,
        "folder of the data; otherwise $PYDTNN_DATA, otherwise the user's cache",
    )
    download: bool = _option("model and data", False, "fetch the data if it is not there")
    validation_split: float = _option(
        "model and data",
        0.0,
        "fraction of the training set to validate on, instead of the test set",
    )
    augment: str = _option(
        "model and data", "", "augmentations of training images, as crop:4,flip,cutout:8"
    )

    epochs: int = _option("training", 3, "times to go through the training set")
    steps_per_epoch: int | None = _option("training", None, "shorten epochs to this many steps")
    batch_size: int = _option("training", 64, "samples per rank and step")
    global_batch_size: int | None = _option(
        "training", None, "samples of all ranks per step; overrides --batch-size"
    )
    accumulation: int = _option("training", 1, "micro-batches per step and rank, to save memory")
    loss: str = _option("training", "cross_entropy", "what to minimise")
    label_smoothing: float = _option("training", 0.0, "of cross_entropy, in [0, 1)")
    metrics: str = _option(
        "training", "accuracy", "what to report besides the loss, as accuracy,top5_accuracy"
    )
    early_stopping: int | None = _option(
        "training", None, "stop after this many epochs without a better monitored value"
    )
    stop_at: float | None = _option("training", None, "stop when the monitored value is this good")
    monitor: str = _option(
        "training",
        "val_accuracy",
        "value watched by --early-stopping, --stop-at, --plateau and for the best weights",
    )
    seed: int = _option("training", 0, "of weights, order, augmentation and dropout")
    dtype: Literal["float32", "float64"] = _option("training", "float32", "precision")

    optimizer: str = _option("optimizer", "sgd", "update rule")
    lr: float | None = _option(
        "optimizer", None, "learning rate; by default the optimizer's own, 0.1 for sgd"
    )
    momentum: float = _option("optimizer", 0.9, "of sgd and lars")
    weight_decay: float = _option(
        "optimizer", 1e-4, "L2 coefficient; biases and norms are left out"
    )
    clip_norm: float | None = _option("optimizer", None, "largest global norm of the gradient")
    optimizer_options: dict[str, Any] = _option(
        "optimizer", {}, 'further options of the rule, as {"nesterov": true}'
    )
    schedule: str = _option("optimizer", "triangular", "how the learning rate moves")
    schedule_options: dict[str, Any] = _option(
        "optimizer", {}, 'options of the schedule, as {"peak": 0.2}'
    )
    warmup_epochs: float = _option("optimizer", 0.0, "epochs of linear warm-up before the schedule")
    lr_scaling: Literal["none", "linear", "sqrt"] = _option(
        "optimizer", "none", "scale the learning rate with global batch / --lr-base-batch"
    )
    lr_base_batch: int = _option("optimizer", 64, "global batch for which --lr is meant")
    plateau: int | None = _option(
        "optimizer",
        None,
        "lower the learning rate after this many epochs without a better monitored value",
    )
    plateau_factor: float = _option("optimizer", 0.1, "by which --plateau multiplies it")

    comm: Literal["auto", "serial", "mpi"] = _option(
        "ranks and device", "auto", "how ranks talk; auto asks the launcher"
    )
    scheme: str = _option("ranks and device", "allreduce", "how gradients are exchanged")
    overlap: bool = _option(
        "ranks and device", True, "exchange gradients while backward runs; false measures the gain"
    )
    bucket_bytes: int = _option(
        "ranks and device", 1 << 20, "size of the messages with gradients, in B"
    )
    backend: Literal["cpu", "numpy"] = _option(
        "ranks and device", "cpu", "compiled kernels, or the readable reference"
    )
    threads: int | None = _option(
        "ranks and device",
        None,
        "per rank; otherwise OMP_NUM_THREADS, otherwise cores / ranks of the host",
    )
    loader_threads: int = _option(
        "ranks and device", 1, "that read and augment ahead; 0 does it inline"
    )

    output_dir: str | None = _option(
        "output", None, "folder of the run; by default a new one, runs/MODEL-DATASET-NUMBER"
    )
    save: str | None = _option("output", None, "write the final weights to this .safetensors file")
    load: str | None = _option("output", None, "start from the weights in this .safetensors file")
    resume: bool = _option("output", False, "continue from the newest checkpoint in --output-dir")
    evaluate_only: bool = _option("output", False, "evaluate the loaded weights and leave")
    checkpoint_epochs: int = _option("output", 1, "epochs between checkpoints; 0 writes none")
    checkpoint_steps: int | None = _option("output", None, "steps between checkpoints")
    keep: int = _option("output", 2, "checkpoints to keep")

    def __post_init__(self) -> None:
        """Check every number by itself.

        Raises
        ------
        ValueError
            In one sentence that names the option.
        """
        for name in (
            "epochs",
            "batch_size",
            "accumulation",
            "bucket_bytes",
            "keep",
            "lr_base_batch",
        ):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in (
            "steps_per_epoch",
            "global_batch_size",
            "threads",
            "checkpoint_steps",
            "plateau",
            "early_stopping",
        ):
            value = getattr(self, name)
            self._require(name, value is None or value >= 1, "at least 1")
        for name in (
            "weight_decay",
            "momentum",
            "warmup_epochs",
            "loader_threads",
            "checkpoint_epochs",
            "seed",
        ):
            self._require(name, getattr(self, name) >= 0, "at least 0")
        self._require("lr", self.lr is None or self.lr > 0, "positive")
        self._require("clip_norm", self.clip_norm is None or self.clip_norm > 0, "positive")
        self._require("validation_split", 0 <= self.validation_split < 1, "at least 0 and below 1")
        self._require("plateau_factor", 0 < self.plateau_factor < 1, "between 0 and 1")
        self._require("epochs", self.warmup_epochs < self.epochs, "more than --warmup-epochs")
        self._require(
            "output-dir",
            not self.resume or self.output_dir is not None,
            "the run's folder with --resume",
        )

    def _require(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} must be {what}, not {getattr(self, name.replace('-', '_'))}")


def options(group: str) -> Iterator[Field[Any]]:
    """Yield the options of a group of the help page."""
    return (f for f in fields(TrainConfig) if f.metadata["group"] == group)
