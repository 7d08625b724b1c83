"""The configuration of a training run; the command line is derived from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydtnn.cli.data_options import DataOptions
from pydtnn.cli.device_checks import DeviceChecks
from pydtnn.cli.exact_checks import ExactChecks
from pydtnn.cli.mesh import read_axes
from pydtnn.cli.monitoring import MonitoringOptions
from pydtnn.cli.observing import TraceOptions
from pydtnn.cli.options import (
    COMMUNICATION,
    DEVICE,
    MODEL,
    OPTIMIZER,
    OUTPUT,
    TRAINING,
    flags,
    option,
)
from pydtnn.cli.virtual_options import VirtualOptions
from pydtnn.cli.waiting import WaitOptions
from pydtnn.layers.collectives import PIPELINE
from pydtnn.utils.registry import key_of
from pydtnn.utils.threads import MOST_THREADS


@dataclass(frozen=True)
class TrainConfig(
    DeviceChecks,
    ExactChecks,
    MonitoringOptions,
    TraceOptions,
    VirtualOptions,
    WaitOptions,
    DataOptions,  # the first options of the help page
):
    """Configuration of a training run; the defaults train ResNet-44 on embedded data in minutes.

    Every field is an option of ``python -m pydtnn.train``, whose help page describes it.

    Raises
    ------
    TypeError, ValueError
        If a value has a wrong type or is out of range, or options are incompatible. The message
        names the option.
    """

    epochs: int = option(TRAINING, 4, "passes over the training set", at_least=1)
    steps_per_epoch: int | None = option(
        TRAINING, int, "limit epochs to this number of steps", at_least=1
    )
    batch_size: int | None = option(
        TRAINING,
        int,
        "samples per rank and step; by default 64, or fewer if the data set has fewer samples",
        at_least=1,
    )
    global_batch_size: int | None = option(
        TRAINING, int, "samples of all ranks per step; replaces --batch-size", at_least=1
    )
    drop_last: bool = option(
        TRAINING, False, "omit the last step of an epoch if it has fewer samples than the others"
    )
    accumulation: int = option(
        TRAINING, 1, "micro-batches per step and rank, to save memory", at_least=1
    )
    loss: str = option(TRAINING, "cross_entropy", "loss to minimise, or path/to/file.py:Class")
    loss_options: dict[str, Any] = option(
        TRAINING,
        {},
        'options of the loss, such as {"class_weights": [1, 5]} or {"class_weights": "balanced"}',
    )
    auxiliary_weights: str = option(
        TRAINING,
        "",
        "factors of the losses of auxiliary outputs, which are trained but not evaluated: 0.3,0.3",
        metavar="LIST",
    )
    label_smoothing: float = option(TRAINING, 0.0, "of cross_entropy", at_least=0, below=1)
    metrics: str | None = option(
        TRAINING,
        str,
        "metrics reported besides the loss: accuracy,top5_accuracy,path/to/file.py:Class; by "
        "default those of the loss, and none for an empty list",
        metavar="LIST",
    )
    monitor: str | None = option(
        TRAINING,
        str,
        "value monitored for the best weights, --early-stopping, --stop-at and --plateau; "
        "by default the first validation metric",
    )
    early_stopping: int | None = option(
        TRAINING, int, "stop after this number of epochs without improvement", at_least=1
    )
    stop_at: float | None = option(TRAINING, float, "stop when the monitored value reaches this")
    ema: float | None = option(
        TRAINING,
        float,
        "evaluate and save an exponential moving average of the weights, with this decay: 0.999",
        above=0,
        below=1,
    )
    freeze: str = option(
        TRAINING,
        "",
        "layers whose parameters are not trained: stem,stage1, or with wildcards",
        metavar="LIST",
    )
    sync_batch_norm: bool = option(
        TRAINING, False, "normalise over the batch of all ranks instead of each rank's own"
    )
    exact: bool = option(
        TRAINING,
        False,
        "the same bytes for any number of ranks and threads; needs --global-batch-size",
    )
    shards: int = option(
        TRAINING,
        8,
        "with --exact: slices of each batch that are computed one by one; at least one per rank",
        at_least=1,
    )
    seed: int = option(TRAINING, 0, "of weights, order, augmentation and dropout", at_least=0)
    dtype: str = option(
        TRAINING,
        "float32",
        "with bfloat16 and float16, parameters and gradients stay float32; float16 is slow with "
        "--device cpu, which runs the readable reference",
        among=("float32", "float64", "bfloat16", "float16"),
    )

    optimizer: str = option(OPTIMIZER, "sgd", "update rule, or path/to/file.py:Class")
    lr: float | None = option(
        OPTIMIZER, float, "highest learning rate; by default the rule's own, 0.05 of sgd", above=0
    )
    momentum: float | None = option(
        OPTIMIZER, float, "of sgd and lars, by default 0.9", at_least=0, below=1
    )
    weight_decay: float | None = option(
        OPTIMIZER,
        float,
        "of all but biases and norms; by default the rule's own (0.01 of adamw and lamb) or 1e-4",
        at_least=0,
    )
    clip_norm: float | None = option(
        OPTIMIZER, float, "largest global norm of the gradient", above=0
    )
    optimizer_options: dict[str, Any] = option(
        OPTIMIZER, {}, 'further options of the rule, such as {"nesterov": true}'
    )
    schedule: str = option(
        OPTIMIZER, "triangular", "learning rate schedule, or path/to/file.py:function of the step"
    )
    schedule_options: dict[str, Any] = option(
        OPTIMIZER, {}, 'options of the schedule, such as {"rise": 0.3}'
    )
    warmup_epochs: float = option(
        OPTIMIZER, 0.0, "epochs of linear warm-up before the schedule", at_least=0
    )
    lr_scaling: str = option(
        OPTIMIZER,
        "none",
        "scale the learning rate with global batch / --lr-base-batch",
        among=("none", "linear", "sqrt"),
    )
    lr_base_batch: int = option(
        OPTIMIZER, 64, "global batch that --lr is meant for, with --lr-scaling", at_least=1
    )
    plateau: int | None = option(
        OPTIMIZER,
        int,
        "reduce the learning rate after this number of epochs without improvement",
        at_least=1,
    )
    plateau_factor: float = option(OPTIMIZER, 0.1, "factor of that reduction", above=0, below=1)

    scheme: str = option(
        COMMUNICATION, "allreduce", "how ranks train together, or path/to/file.py:Class"
    )
    scheme_options: dict[str, Any] = option(
        COMMUNICATION, {}, 'options of the scheme, such as {"period": 8}'
    )
    compress: str | None = option(
        COMMUNICATION,
        str,
        "compression of gradients in messages, or path/to/file.py:compressor",
    )
    compress_options: dict[str, Any] = option(
        COMMUNICATION, {}, 'options of the compressor, such as {"share": 0.01}'
    )
    allreduce: str = option(
        COMMUNICATION,
        "rule",
        "how arrays are summed: rule is MPI's own way inside a host and a schedule between "
        "hosts, vendor MPI's own, auto the fastest for each size; or path/to/file.py:function",
    )
    overlap: bool = option(
        COMMUNICATION, True, "exchange gradients while backward runs; --no-overlap to compare"
    )
    bucket_bytes: int | None = option(
        COMMUNICATION,
        int,
        "size of the messages with gradients, in B; by default 1 MiB inside a host, and between "
        "hosts a quarter of all gradients, at least 128 KiB and at most 1 MiB",
        at_least=1,
    )
    comm: str = option(
        COMMUNICATION,
        "auto",
        "transport of arrays between GPUs: auto is nccl if there are several ranks; mpi copies "
        "through host memory",
        among=("auto", "mpi", "nccl"),
    )
    cuda_aware: bool = option(
        COMMUNICATION, False, "with --comm mpi: pass GPU arrays directly to the MPI library"
    )
    check_messages: bool = option(
        COMMUNICATION,
        False,
        "compare the arguments of every call across ranks, to find errors in a scheme (slow)",
    )
    parallel: str | None = option(
        COMMUNICATION,
        str,
        "ranks along each axis of a mesh: data=2,filter=4; auto is the fastest by the performance "
        "model; by default all along data",
        metavar="LIST",
    )
    micro_batches: int | None = option(
        COMMUNICATION, int, "per rank and step; by default 4 per stage of a pipeline", at_least=1
    )
    pipeline_schedule: str = option(
        COMMUNICATION, "1f1b", "1f1b, eager_1f1b, gpipe, or path/to/file.py:function"
    )
    plan: str | None = option(
        COMMUNICATION,
        str,
        "how the network is cut along the axes besides data: a strategy, a YAML file, or its rules "
        "in braces; by default each axis is used for the strategy of its name",
    )
    device: str = option(
        DEVICE,
        "cpu",
        "compiled kernels, one GPU per rank, or the readable reference (slow)",
        among=("cpu", "cuda", "numpy"),
    )
    tf32: bool | None = option(
        DEVICE,
        bool,
        "with --device cuda: round float32 to 10 bits before multiplication; by default "
        "PYDTNN_TF32, otherwise yes",
    )
    graph: bool = option(
        DEVICE,
        True,
        "with --device cuda: replay the training step as one CUDA graph where possible",
    )
    fusion: bool = option(DEVICE, True, "fuse batch norm, additions and ReLU into convolutions")
    recompute: str | None = option(
        DEVICE,
        str,
        "drop values in forward and compute them again in backward, to save memory: in this number "
        "of parts, between these layers (stage1.?,stage2.?), or auto",
        metavar="N|LAYERS|auto",
    )
    memory_limit: str | None = option(
        DEVICE,
        str,
        "with --recompute auto: compute as little as possible again within this memory per rank, "
        "such as 2GiB",
        metavar="SIZE",
    )
    threads: int | None = option(
        DEVICE,
        int,
        "threads per rank; by default OMP_NUM_THREADS, otherwise cores / ranks of the host",
        at_least=1,
        at_most=MOST_THREADS,
    )
    tuning: str | None = option(
        DEVICE,
        str,
        "choose convolution algorithms by measurement, by a fixed rule, or only direct "
        "ones; by default PYDTNN_TUNING, otherwise measure",
        among=("measure", "fixed", "direct"),
    )
    loader_threads: int = option(
        DEVICE, 1, "threads that prefetch batches; with 0, batches are made on demand", at_least=0
    )

    output_dir: str | None = option(
        OUTPUT,
        str,
        "folder of the run; by default a new one, runs/MODEL-DATASET-NUMBER",
        metavar="FOLDER",
    )
    save: str | None = option(
        OUTPUT,
        str,
        "write the final model to this folder, such as digits.pydtnn, for pydtnn.load; a name that "
        "ends in .safetensors is a file of the weights only",
        metavar="PATH",
    )
    load: str | None = option(
        OUTPUT, str, "start from the weights in this safetensors file", metavar="FILE"
    )
    load_options: dict[str, Any] = option(
        OUTPUT,
        {},
        'options of --load, such as {"strict": false}, which loads the arrays that fit the model',
    )
    resume: bool = option(
        OUTPUT,
        False,
        "continue the run in FOLDER with its own options, which further options override; without "
        "FOLDER, continue from the newest checkpoint in --output-dir",
        metavar="FOLDER",
    )
    evaluate_only: bool = option(
        OUTPUT, False, "evaluate the weights of --load or --resume, and exit"
    )
    checkpoint_epochs: int = option(
        OUTPUT, 1, "epochs between checkpoints; 0 writes none after epochs", at_least=0
    )
    checkpoint_steps: int | None = option(OUTPUT, int, "steps between checkpoints", at_least=1)
    keep: int = option(OUTPUT, 2, "checkpoints to keep", at_least=1)
    progress: str = option(
        OUTPUT,
        "auto",
        "a bar, plain lines, or none; auto is a bar on a terminal and plain lines elsewhere",
        among=("auto", "bar", "plain", "none"),
    )
    verbose: bool = option(
        OUTPUT, False, "log choices of algorithms, messages, files and times of the start"
    )
    quiet: bool = option(OUTPUT, False, "print errors and the final result only")

    @property
    def saves_weights(self) -> bool:
        """Whether `save` is a file of weights, and not a folder with the whole model."""
        return self.save is not None and self.save.endswith(".safetensors")

    def __post_init__(self) -> None:
        if self.warmup_epochs >= self.epochs:
            raise ValueError(
                f"train: --warmup-epochs must be below --epochs {self.epochs}, got "
                f"{self.warmup_epochs:g}; shorten the warm-up or increase --epochs"
            )
        if self.resume and self.output_dir is None:
            raise ValueError(
                "train: --resume requires the folder of the run to continue; use --resume FOLDER"
            )
        if self.evaluate_only and not (self.load or self.resume):
            raise ValueError(
                "train: --evaluate-only requires weights; add --load FILE or --resume FOLDER"
            )
        if self.quiet and (self.verbose or self.progress in ("bar", "plain")):
            other = "--verbose" if self.verbose else f"--progress {self.progress}"
            raise ValueError(f"train: --quiet cannot be combined with {other}; omit one of them")
        self.check_device()
        self.check_tensorboard()
        self.check_trace()
        self.check_waits()
        self.check_virtual()
        self._check_partners()
        self.check_exact()

    def _check_partners(self) -> None:
        """Raise ValueError if an option has no effect because the option it refers to is unset."""
        usual, axes = flags(TrainConfig), read_axes(self.parallel)
        for name, partner, missing in (
            ("shards", "--exact", not self.exact),
            ("lr_base_batch", "--lr-scaling", self.lr_scaling == "none"),
            ("plateau_factor", "--plateau", self.plateau is None),
            ("load_options", "--load", self.load is None),
            ("stage", "--dataset shards", key_of(self.dataset) != "shards"),
            ("plan", "--parallel", not axes),
            ("micro_batches", "--parallel pipeline=2", PIPELINE not in axes),
            ("pipeline_schedule", "--parallel pipeline=2", PIPELINE not in axes),
            ("memory_limit", "--recompute auto", "auto" not in (self.recompute, self.parallel)),
        ):
            if missing and getattr(self, name) != usual[name].default:
                raise ValueError(f"train: {usual[name].label} requires {partner}")

    def course(self) -> dict[str, Any]:
        """Return the options that affect the result of training: no paths, ranks or threads."""
        groups, elsewhere = (MODEL, TRAINING, OPTIMIZER), ("data_dir", "download", "stage")
        return {
            name: getattr(self, name)
            for name, own in flags(TrainConfig).items()
            if own.group in groups and name not in elsewhere
        }
