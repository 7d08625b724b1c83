"""The configuration of a training run; the command line is derived from it."""

from __future__ import annotations

import os
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Any

from pydtnn import data
from pydtnn.model.formats import read_formats
from pydtnn.parallel.mesh import parse_axes
from pydtnn.training.capabilities import FEATURES, Feature, conflicts
from pydtnn.utils import plain_yaml
from pydtnn.utils.interval import AUTO, DEFAULT_MTBF, parse_interval
from pydtnn.utils.machine import MAX_THREADS
from pydtnn.utils.names import key_of, unknown
from pydtnn.utils.option import Option, options_of
from pydtnn.utils.units import parse_quantity

MODEL, TRAINING, OPTIMIZER, OUTPUT, OBSERVATION, DEVICE, COMMUNICATION, VIRTUAL = GROUPS = (
    "model and data",
    "training",
    "optimizer",
    "output",
    "observation",
    "device",
    "communication",
    "virtual ranks",
)
"""The groups of options, in the order of the help page, which is that of use."""

PLACEHOLDERS = {int: "N", float: "X", str: "NAME", dict: "JSON"}
"""Placeholders of values on the help page, by the option's type."""


MEMBERS: defaultdict[str, dict[str, Flag]] = defaultdict(dict)
"""The options that are typed in the value of another one, by its name and by theirs there."""


class Flag(Option):
    """Option of the command line.

    Attributes
    ----------
    group : str
        Group on the help page: `GROUP` of the class that declares the option.
    help : str
        Description on the help page.
    metavar : str
        Placeholder of the value on the help page; empty if the option has no value.
    owner, key : str
        The option in whose value it is typed, and its name there: ``--trace FOLDER:steps=10:20``.
        Empty for an option of its own. The key "options" is that of further ones of a named thing.
    needs, excludes : dict of str to str
        What it needs, of all values or of some ("--comm nccl"); and what it excludes, besides the
        features of a run (`pydtnn.training.capabilities`). Then "; " and what to do.
    """

    group: str

    def __init__(self, help: str, metavar: str | None, of: str, *declared: Any) -> None:
        needs, self.excludes, *others = declared
        super().__init__(*others)
        shown = "{" + ",".join(self.choices) + "}" if self.choices else PLACEHOLDERS.get(self.kind)
        self.help = help
        self.metavar = metavar or shown or ""
        self.owner, _, self.key = of.partition(".")
        self.needs: Mapping[str, str] = {"": needs} if isinstance(needs, str) else needs

    def __set_name__(self, owner: type, name: str) -> None:
        super().__set_name__(owner, name)
        self.group = vars(owner)["GROUP"]
        if self.owner:
            self.key = self.key or name.removeprefix(f"{self.owner}_")
            MEMBERS[self.owner][self.key] = self
        usual = f"--{self.owner.replace('_', '-')}" if self.owner in SWITCHES else ""
        needs = {option or self.label: text or usual for option, text in self.needs.items()}
        self.needs = {option: text for option, text in needs.items() if text}

    @property
    def spelling(self) -> str:
        """Name as an option of its own, which those in values of others had before."""
        return "--" + self.name.replace("_", "-")

    @property
    def label(self) -> str:
        """Name on the command line: ``--trace``, or ``--trace steps`` in the value of that one."""
        return f"--{self.owner.replace('_', '-')} {self.key}" if self.owner else self.spelling

    @property
    def members(self) -> dict[str, Flag]:
        """The options in the value of this one."""
        return MEMBERS.get(self.name, {})

    def check(self, value: Any, who: str = "train") -> Any:
        """Return a validated value; text must not be empty, unless it is a list."""
        value = super().check(value, "train")
        if value == "" and self.metavar != "LIST":
            raise ValueError(f"train: {self.label} must not be empty; set a value or omit it")
        if value is not None and self.metavar in READERS:
            READERS[self.metavar](f"train: {self.label}", value)
        if isinstance(value, str) and not _can_be_a_name(value):
            raise ValueError(
                f"train: {self.label} must contain only characters that file names can have, got "
                f"{value!r}"
            )
        return value

    def parts(self, text: str) -> Iterator[tuple[Flag, str | bool]]:
        """Yield the options in a text ``VALUE:name=value,name=value`` with their texts.

        That of a dictionary is ``.name=value`` for an entry of it. The text of an option that is
        true or false is a list of others only; before a colon, no value leaves it as it is.
        """
        found = None
        if self.members:
            found = re.fullmatch(r"(?s)()(.*)" if self.kind is bool else _WITH_MEMBERS, text)
        if found is None:
            yield self, text
            return
        if found[1] or self.kind is bool:
            yield self, found[1] or True
        items = re.findall(_ITEM, found[2])
        if not items or ",".join(f"{key}={value}" for key, value in items) != found[2]:
            raise ValueError(
                f"train: {self.label}: expected values of {', '.join(self.members)} such as "
                f"{min(self.members)}=..., with commas between them, got {found[2]!r}"
            )
        for key, value in items:
            if key in self.members:
                yield self.members[key], value
            elif "options" in self.members:
                yield self.members["options"], f".{key}={value}"
            elif key in REMOVED:
                raise ValueError(f"train: {self.label} {key} has been removed: {REMOVED[key]}")
            else:
                raise ValueError(f"train: {unknown(f'value of {self.label}', key, self.members)}")


READERS: dict[str, Callable[[str, str], object]] = {
    "INTERVAL": parse_interval,
    "TIME": partial(parse_quantity, unit="s"),
    "SIZE": partial(parse_quantity, unit="B"),
}
"""What reads, and refuses, texts of options with these placeholders."""

SWITCHES = (
    *("load", "teacher", "compress", "exact", "survive", "trace", "tensorboard", "virtual_ranks"),
)
"""Options without which those in their values have no effect."""

HOST, OMIT = "use --device cpu or numpy", "omit one of them"

_NAME = r"[A-Za-z_][\w.]*"
_WITH_MEMBERS = rf"(?s)(.*?):({_NAME}=.*)"
_ITEM = rf'(?s)({_NAME})=((?:"(?:[^"\\]|\\.)*"|[^,]|,(?!{_NAME}=))*)'


def option(
    default: Any,
    help: str,
    *,
    of: str = "",
    among: Iterable[str] = (),
    metavar: str | None = None,
    needs: str | Mapping[str, str] = "",
    excludes: Mapping[str, str] = MappingProxyType({}),
    **limits: float,
) -> Any:
    """Declare an attribute of a dataclass that is an option of the command line.

    Parameters
    ----------
    help, metavar : str
        See `Flag`; the default placeholder is the list of choices, or one of `PLACEHOLDERS`.
    of : str
        Owner of an option that is typed in the value of another one, such as "trace", or owner
        and key, "parallel.schedule". By default the key is the name, without that of the owner.
    needs : str or mapping
        See `Flag`; a text is what all values need.
    excludes : mapping
        See `Flag`.
    default, among, **limits
        See `pydtnn.utils.option.option`.
    """
    return Flag(help, metavar, of, needs, excludes, default, among, limits)


@cache
def flags(config: type) -> dict[str, Flag]:
    """Return the options of a configuration by name, in the order in which it declares them."""
    return {name: own for name, own in options_of(config).items() if isinstance(own, Flag)}


def typed(config: TrainConfig, name: str) -> str:
    """Return an option of a configuration as it is typed: ``--epochs 8`` or ``--no-fusion``.

    The options in its value are those that are not the default.

    >>> typed(TrainConfig(scheme="diloco", scheme_options={"period": 4}, overlap=False), "scheme")
    '--scheme diloco:period=4,overlap=false'
    >>> typed(TrainConfig(exact=True, global_batch_size=8, shards=4), "shards")
    '--exact shards=4'
    """
    own, value = flags(TrainConfig)[name], getattr(config, name)
    if own.owner:
        owner, start, members = flags(TrainConfig)[own.owner], "", {own.key: own}
    else:
        owner, start, members = own, "" if value is None else _text(value), own.members
    items: list[str] = []
    for key, member in members.items():
        given = getattr(config, member.name)
        if key == "options" and all(n.isidentifier() and n not in members for n in given):
            items += [f"{name}={plain_yaml.dump(entry)}" for name, entry in given.items()]
        elif given != member.default or own.owner:
            items.append(f"{key}={_text(given)}")
    text = ",".join(items)
    if owner.kind is bool:
        return f"{owner.label} {shlex.quote(text)}" if items else _switch(owner, value)
    return f"{owner.label} {shlex.quote(f'{start}:{text}' if items else _text(value))}"


def _switch(own: Flag, value: bool) -> str:
    return own.label if value else f"--no-{own.label[2:]}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else plain_yaml.dump(value)


def _can_be_a_name(text: str) -> bool:
    """Return whether text contains neither a null character nor lone surrogates."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


AUTO_PARALLEL = "auto"
"""Value of `--parallel` for the fastest strategy by the performance model."""


def read_axes(text: str | None) -> dict[str, int]:
    """Return the ranks along each axis of a mesh; none without a text, or for "auto".

    Raises
    ------
    ValueError
        If the text is not a list of axes with their ranks.

    Examples
    --------
    >>> read_axes("data=2,filter=4")
    {'data': 2, 'filter': 4}
    """
    return {} if text == AUTO_PARALLEL else parse_axes("train: --parallel", text or "")


@dataclass(frozen=True)
class _ModelOptions:
    """Network and data."""

    GROUP = MODEL
    model: str = option("resnet44", "name of a model, or path/to/file.py:function")
    model_options: dict[str, Any] = option({}, 'of the model: {"shortcut": "A"}', of="model")
    dataset: str = option("synthetic", "name of a data set, or path/to/file.py:function")
    dataset_options: dict[str, Any] = option(
        {}, 'of the data set: {"samples": 20000}', of="dataset"
    )
    data_dir: str | None = option(
        str, "folder of the data; by default $PYDTNN_DATA, or the user's cache", metavar="FOLDER"
    )
    download: bool = option(False, "download the data if they are missing")
    image_size: int | None = option(
        int, "height and width to which images are resized and cropped", at_least=1, of="dataset"
    )
    skip_bad: bool = option(
        False, "omit files that are not images, instead of an error", of="dataset"
    )
    exif_rotation: bool = option(
        True, "turn photographs to the orientation in their metadata", of="dataset"
    )
    validation_split: float = option(
        0.0, "validate on this fraction of the training set", at_least=0, below=1
    )
    augment: str = option(
        "",
        "of training images: crop:4,flip,jitter or resized_crop:0.3,randaugment:2:9",
        metavar="LIST",
    )
    mixup: float | None = option(
        float,
        "average pairs of samples and labels, with weights from Beta(X, X)",
        of="augment",
        above=0,
    )
    cutmix: float | None = option(
        float, "mix boxes of images, with areas from Beta(X, X)", of="augment", above=0
    )
    mirrored: bool = option(
        False, "evaluate the mean of the outputs for an image and its mirror image", of="augment"
    )
    moved: int = option(
        0, "mirrored, and also images moved by this number of pixels", of="augment", at_least=0
    )


@dataclass(frozen=True)
class _TrainingOptions:
    """What is trained, how long, and in which precision."""

    GROUP = TRAINING
    epochs: int = option(4, "passes over the training set", at_least=1)
    steps_per_epoch: int | None = option(int, "limit epochs to this number of steps", at_least=1)
    batch_size: int | None = option(
        int, "samples per rank and step; by default 64, or fewer of a smaller set", at_least=1
    )
    global_batch_size: int | None = option(
        int, "samples of all ranks per step, instead of --batch-size", at_least=1
    )
    drop_last: bool = option(False, "omit the last step of an epoch if it has fewer samples")
    accumulation: int = option(1, "micro-batches per step and rank, to save memory", at_least=1)
    loss: str = option("cross_entropy", "loss to minimise, or path/to/file.py:Class")
    loss_options: dict[str, Any] = option(
        {}, 'of the loss: {"class_weights": [1, 5]} or {"class_weights": "balanced"}', of="loss"
    )
    auxiliary_weights: str = option(
        "", "factors of the losses of auxiliary outputs: 0.3,0.3", metavar="LIST", of="loss"
    )
    label_smoothing: float = option(0.0, "of cross_entropy", at_least=0, below=1, of="loss")
    metrics: str | None = option(
        str,
        "reported besides the loss: accuracy,top5_accuracy,path/to/file.py:Class; by default "
        "those of the loss, and none for an empty list",
        metavar="LIST",
    )
    monitor: str | None = option(
        str, "value that is to improve; by default the first validation metric"
    )
    early_stopping: int | None = option(
        int, "stop after this number of epochs without improvement", at_least=1
    )
    restore_best: bool = option(False, "end with the weights of the best epoch")
    stop_at: float | None = option(float, "stop when the monitored value reaches this")
    ema: float | None = option(
        float,
        "evaluate and save a moving average of the weights, of this decay: 0.999",
        above=0,
        below=1,
    )
    teacher: str | None = option(
        str, "saved model whose outputs are targets beside the labels", metavar="FOLDER"
    )
    temperature: float = option(2.0, "divides the logits of both", above=0, of="teacher")
    teacher_weight: float = option(0.5, "in the loss", at_least=0, at_most=1, of="teacher")
    freeze: str = option(
        "", "layers that are not trained: stem,stage1, or with wildcards", metavar="LIST"
    )
    sync_batch_norm: bool = option(False, "normalise over the batch of all ranks")
    exact: bool = option(
        False,
        "the same bytes for any number of ranks and threads; needs a global batch size",
        needs="--global-batch-size; set the number of samples",
    )
    shards: int = option(
        8,
        "slices of a batch that are computed one by one, at least one per rank",
        at_least=1,
        of="exact",
    )
    seed: int = option(0, "of weights, order, augmentation and dropout", at_least=0)
    dtype: str = option(
        "float32",
        "of activations; parameters and gradients have at least 32 bits; float16 is slow on a CPU",
        among=("float32", "float64", "bfloat16", "float16"),
    )
    formats: str | None = option(
        str,
        "round values to fewer bits, and compute in float32: activations=e4m3fn,weights=e2m1:32, "
        "or nvfp4, mxfp4",
        metavar="LIST",
    )


@dataclass(frozen=True)
class _OptimizerOptions:
    """Update rule and learning rate."""

    GROUP = OPTIMIZER
    optimizer: str = option("sgd", "update rule, or path/to/file.py:Class")
    lr: float | None = option(
        float, "highest learning rate; by default the rule's own, 0.05 of sgd", above=0
    )
    momentum: float | None = option(float, "of sgd and lars, by default 0.9", at_least=0, below=1)
    weight_decay: float | None = option(
        float,
        "of all but biases and norms; by default the rule's own (0.01 of adamw and lamb) or 1e-4",
        at_least=0,
    )
    clip_norm: float | None = option(float, "largest global norm of the gradient", above=0)
    optimizer_options: dict[str, Any] = option(
        {}, 'of the rule: {"nesterov": true}', of="optimizer"
    )
    schedule: str = option(
        "triangular", "of the learning rate, or path/to/file.py:function of the step"
    )
    schedule_options: dict[str, Any] = option({}, 'of the schedule: {"rise": 0.3}', of="schedule")
    warmup_epochs: float = option(0.0, "epochs of linear warm-up before the schedule", at_least=0)
    lr_scaling: str = option(
        "none",
        "scale the rate with the global batch, divided by base_batch",
        among=("none", "linear", "sqrt"),
    )
    lr_base_batch: int = option(
        64,
        "global batch that --lr is meant for",
        at_least=1,
        of="lr_scaling.base_batch",
        needs="--lr-scaling",
    )
    plateau: int | None = option(
        int,
        "reduce the rate after this number of epochs without improvement",
        at_least=1,
        of="schedule",
    )
    plateau_factor: float = option(
        0.1,
        "factor of that reduction",
        above=0,
        below=1,
        of="schedule",
        needs="--schedule plateau",
    )


@dataclass(frozen=True)
class _OutputOptions:
    """Files that a run reads and writes."""

    GROUP = OUTPUT
    output_dir: str | None = option(
        str, "folder of the run; by default a new one, runs/MODEL-DATASET-NUMBER", metavar="FOLDER"
    )
    save: str | None = option(
        str,
        "write the final model to this folder, for pydtnn.load, or its weights to a file, if the "
        "name ends in .safetensors",
        metavar="PATH",
    )
    load: str | None = option(str, "start from a file of weights, or a state dict", metavar="FILE")
    load_options: dict[str, Any] = option(
        {}, '{"strict": false} loads the arrays that fit the model', of="load"
    )
    resume: bool = option(
        False,
        "continue the run in FOLDER with its own options, which further options override; without "
        "FOLDER, from the newest checkpoint in --output-dir",
        metavar="FOLDER",
        needs="--output-dir; name the folder of the run: --resume FOLDER",
    )
    evaluate_only: bool = option(
        False, "evaluate the weights of --load or --resume, and exit", needs="--load or --resume"
    )
    checkpoint_epochs: int = option(
        1, "epochs between checkpoints; 0 for none", at_least=0, of="checkpoint_every.epochs"
    )
    checkpoint_steps: int | None = option(
        int, "steps between checkpoints", at_least=1, of="checkpoint_every.steps"
    )
    checkpoint_every: str | None = option(
        str,
        "interval of checkpoints: 5min, '200 steps', '2 epochs' or auto, by their cost and mtbf; "
        "instead of epochs and steps",
        metavar="INTERVAL",
        excludes={"--checkpoint-every epochs or --checkpoint-every steps": OMIT},
    )
    mtbf: str = option(
        DEFAULT_MTBF,
        "mean time between two failures of the run, for auto",
        metavar="TIME",
        of="checkpoint_every",
        needs="--checkpoint-every auto or --survive",
    )
    checkpoint_background: bool = option(
        True,
        "flush checkpoints to the disk while training continues",
        of="checkpoint_every.background",
    )
    grace: float | None = option(
        float,
        "save and end after SIGUSR1, too, which Slurm sends before it ends a job, and a step that "
        "may take this time, in s; by default SIGUSR1 only reports",
        above=0,
    )
    keep: int = option(2, "last checkpoints to keep", at_least=1)
    progress: str = option(
        "auto",
        "a bar, plain lines, or none; auto is a bar on a terminal",
        among=("auto", "bar", "plain", "none"),
    )
    verbose: bool = option(
        False, "log choices of algorithms, messages, files and times of the start"
    )
    quiet: bool = option(False, "print errors and the final result only")


@dataclass(frozen=True)
class _ObservationOptions:
    """What a run records."""

    GROUP = OBSERVATION
    trace: str | None = option(
        str, "record what every rank does in this folder: docs/tracing.md", metavar="FOLDER"
    )
    trace_steps: str | None = option(
        str,
        "record these steps only, counted from 0; 10:20 excludes step 20",
        metavar="FIRST:STOP",
        of="trace",
    )
    trace_kernels: bool = option(False, "record every call of a kernel too", of="trace")
    check_equal: int | None = option(
        int,
        "steps between comparisons of the parameters and the optimizer's state of all ranks; by "
        "default 100 where these must be equal; 0 for none",
        at_least=0,
    )
    verify_steps: int | None = option(
        int, "steps after which other ranks compute gradients again, and compare them", at_least=1
    )
    tensorboard: bool = option(
        False, "write curves for TensorBoard to the folder of the run; requires tensorboardX"
    )
    tensorboard_histograms: int | None = option(
        int, "epochs between histograms of parameters and gradients", at_least=1, of="tensorboard"
    )
    mlflow: str | None = option(
        str, "report options, results and the model to this experiment of MLflow"
    )
    wandb: str | None = option(
        str, "report options, results and the model to this project of Weights & Biases"
    )


@dataclass(frozen=True)
class _DeviceOptions:
    """Device, memory and threads."""

    GROUP = DEVICE
    device: str = option(
        "cpu",
        "compiled kernels, one GPU per rank, or the readable reference (slow)",
        among=("cpu", "cuda", "numpy"),
    )
    tf32: bool | None = option(
        bool,
        "of cuda: round float32 to 10 bits before products; by default PYDTNN_TF32 or true",
        of="device",
        needs="--device cuda --dtype float32",
    )
    graph: bool = option(
        True, "of cuda: replay the training step as one CUDA graph where possible", of="device"
    )
    fusion: bool = option(True, "fuse batch norm, additions and ReLU into convolutions")
    recompute: str | None = option(
        str,
        "compute values again in backward, to save memory: in this number of parts, between these "
        "layers (stage1.?,stage2.?), or auto",
        metavar="N|LAYERS|auto",
    )
    memory_limit: str | None = option(
        str,
        "with --recompute auto: recompute as little as possible within it, per rank: 2GiB",
        metavar="SIZE",
        needs="--recompute auto or --parallel auto or --parallel schedule=auto",
    )
    threads: int | None = option(
        int,
        "per rank; by default OMP_NUM_THREADS, or cores / ranks of the host",
        at_least=1,
        at_most=MAX_THREADS,
    )
    tuning: str | None = option(
        str,
        "choose algorithms by measurement, by a rule, or direct ones; by default PYDTNN_TUNING or "
        "measure",
        among=("measure", "fixed", "direct"),
    )
    loader_threads: int = option(1, "threads that prefetch batches; 0: made on demand", at_least=0)


@dataclass(frozen=True)
class _CommunicationOptions:
    """Ranks, and what they do if one fails."""

    GROUP = COMMUNICATION
    timeout: float = option(
        300.0,
        "longest wait for other ranks or a batch, in s, after which a table names the late rank, "
        "and all end with status 75; 0 for no limit",
        at_least=0,
    )
    survive: bool = option(
        False,
        "continue without ranks that fail, or are late by --timeout; requires Open MPI and mpirun "
        "--with-ft ulfm: docs/survival.md",
        excludes={"--device cuda": HOST, "--virtual-ranks": OMIT},
    )
    min_ranks: int = option(
        1, "with fewer ranks, save a checkpoint and end with status 75", at_least=1, of="survive"
    )
    buddy_interval: str = option(
        AUTO,
        "of copies of state that not all ranks have: 5min, '20 steps' or auto",
        metavar="INTERVAL",
        of="survive",
    )
    survive_stages: str = option(
        "recut",
        "where a mesh of data and pipeline loses a rank: recut the network for those that remain, "
        "or recycle: ranks with the same stage compute its micro-batches",
        among=("recut", "recycle"),
        of="survive",
    )
    straggler_factor: float = option(
        1.5, "name ranks that compute this many times as long as others; 0 for none", at_least=0
    )
    scheme: str = option("allreduce", "how ranks train together, or path/to/file.py:Class")
    scheme_options: dict[str, Any] = option({}, 'of the scheme: {"period": 8}', of="scheme")
    compress: str | None = option(str, "of gradients in messages, or path/to/file.py:compressor")
    compress_options: dict[str, Any] = option(
        {}, 'of the compressor: {"share": 0.01}', of="compress"
    )
    allreduce: str = option(
        "rule",
        "how arrays are summed: rule is MPI's own way inside a host and a schedule between hosts, "
        "vendor MPI's own, auto the fastest for each size; or path/to/file.py:function",
        needs={"--allreduce !vendor --device cuda": "--comm mpi"},  # NCCL has its own
    )
    overlap: bool = option(True, "exchange gradients while backward runs", of="scheme")
    bucket_bytes: int | None = option(
        int,
        "size of messages with gradients, in B; by default 1 MiB, or less between hosts",
        at_least=1,
        of="scheme",
    )
    comm: str = option(
        "auto",
        "transport of arrays between GPUs: auto is nccl if there are several ranks; mpi copies "
        "through host memory",
        among=("auto", "mpi", "nccl"),
        needs={"--comm nccl": "--device cuda"},
    )
    cuda_aware: bool = option(
        False,
        "of mpi: pass GPU arrays directly to the MPI library",
        of="comm",
        needs="--device cuda --comm mpi",
        excludes={"--allreduce !vendor": "omit one, as it sums in host memory"},
    )
    parallel: str | None = option(
        str,
        "ranks along each axis of a mesh: data=2,filter=4, or for sharded schemes data=2,shard=4; "
        "auto is the fastest by the performance model; by default all along data",
        metavar="LIST",
    )
    exact_mesh: bool = option(
        False,
        "processes share the ranks of the axes, which are threads: the same bytes for any number "
        "of processes and threads",
        of="parallel.exact",
        excludes={
            "--parallel auto": "name the axes, as another mesh has other sums",
            "--device cuda": HOST,
            "--tuning measure": "use fixed, as algorithms differ between measurements",
            "--allreduce !rule": "omit it, as sums have one order",
            "--scheme decoupled_diloco": "use diloco, as its window depends on times",
            "--survive or --grace or --virtual-ranks": OMIT,
        },
    )
    micro_batches: int | None = option(
        int, "per rank and step; by default 4 per rank of a pipeline", at_least=1, of="parallel"
    )
    pipeline_schedule: str = option(
        "1f1b",
        "1f1b, eager_1f1b, gpipe, interleaved:2 (stages per rank), zb_h1, zb_2p, zb_v, chimera, "
        "dualpipe, 2bw, recycle:2x4-5 (2 pipelines of 4 stages without rank 5), "
        "path/to/file.py:function, or auto, the fastest by the performance model",
        of="parallel.schedule",
        needs="--parallel pipeline=2 or --parallel auto --parallel schedule=auto",
    )
    plan: str | None = option(
        str,
        "how the network is cut along axes besides data: a strategy, a YAML file, or rules in "
        "braces; by default each axis is used for the strategy of its name",
        needs="--parallel",
        excludes={"--parallel auto": OMIT},
    )


@dataclass(frozen=True)
class _VirtualOptions:
    """Ranks that are threads, with the times of a platform."""

    GROUP = VIRTUAL
    virtual_ranks: int | None = option(
        int,
        "train on this number of ranks that are threads of this process, with the times of "
        "--platform: docs/virtual-ranks.md",
        at_least=1,
        at_most=1024,
        needs="--platform; name one such as cpu-1gbit, or make one by pydtnn calibrate",
        excludes={
            "--device cuda": HOST,
            "--loader-threads !0": "omit it, as batches are made when they are needed",
        },
    )
    platform: str | None = option(
        str,
        "name of a platform, or path/to/file.yaml; by default this job's ranks, measured",
        metavar="FILE",
    )
    disturb: str | None = option(
        str,
        "slow ranks and jitter, in a YAML file",
        metavar="FILE",
        of="virtual_ranks",
    )


@dataclass(frozen=True)
class TrainConfig(
    _VirtualOptions,
    _CommunicationOptions,
    _DeviceOptions,
    _ObservationOptions,
    _OutputOptions,
    _OptimizerOptions,
    _TrainingOptions,
    _ModelOptions,
):
    """Configuration of a training run; the defaults train ResNet-44 on embedded data in minutes.

    Every field is an option of ``python -m pydtnn.train``, whose help page describes it.

    Raises
    ------
    TypeError, ValueError
        If a value has a wrong type or is out of range, or options are incompatible. The message
        names the option.
    """

    def __post_init__(self) -> None:
        if self.warmup_epochs >= self.epochs:
            raise ValueError(
                f"train: --warmup-epochs must be below --epochs {self.epochs}, got "
                f"{self.warmup_epochs:g}; shorten the warm-up or increase --epochs"
            )
        read_formats(self.formats, self.dtype, self.device)
        if parse_interval("train: --survive buddy_interval", self.buddy_interval).epochs:
            raise ValueError(
                "train: --survive buddy_interval must be a time, steps or auto, got "
                f"{self.buddy_interval!r}; use 5min, '20 steps' or auto"
            )
        read_axes(self.parallel)
        check_combinations(self)

    @property
    def saves_weights(self) -> bool:
        """Whether `save` is a file of weights, and not a folder with the whole model."""
        return self.save is not None and self.save.endswith(".safetensors")

    @property
    def equal_bytes(self) -> bool:
        """Whether results are to have the same bytes for any number of processes."""
        return self.exact or self.exact_mesh

    def course(self) -> dict[str, Any]:
        """Return the options that affect the result of training: no paths, ranks or threads."""
        groups, elsewhere = (MODEL, TRAINING, OPTIMIZER), ("data_dir", "download")
        return {
            name: getattr(self, name)
            for name, own in flags(TrainConfig).items()
            if own.group in groups and name not in elsewhere
        }

    def mixings(self) -> tuple[data.Mixing, ...]:
        """Return the mixtures of training samples that the options choose."""
        chosen = {"Mixup": self.mixup, "CutMix": self.cutmix}  # imported if they are used
        return tuple(getattr(data, name)(a) for name, a in chosen.items() if a is not None)


def check_combinations(config: TrainConfig) -> None:
    """Raise ValueError if an option lacks another one, or two cannot be combined."""

    def find(name: str) -> str:
        return _typed_among(config, FEATURES[name].options if name in FEATURES else name)

    known = flags(TrainConfig).values()
    for option, text in (item for own in known for item in own.needs.items()):
        if (found := find(option)) and not find(text.partition("; ")[0]):
            raise ValueError(f"train: {found} requires {text}")
    excluded = {own.label: Feature(excludes=own.excludes) for own in known}
    for feature, other, lacks, why in conflicts(excluded | FEATURES, find):
        if lacks:
            raise ValueError(f"train: {find(feature)} requires {FEATURES[other].options}")
        advice = why.rpartition("; ")[2]
        raise ValueError(f"train: {find(feature)} cannot be combined with {find(other)}; {advice}")


def _typed_among(config: TrainConfig, options: str) -> str:
    """Return the first of the alternatives "--a or --b=value" that a configuration has."""
    for several in filter(None, options.split(" or ")):
        found = [_typed_as(config, *text.split(" ")) for text in several[2:].split(" --")]
        if all(found):
            return " with ".join(found)
    return ""


def _typed_as(config: TrainConfig, label: str, value: str = "") -> str:
    """Return an option as it is typed, if it has this value; without one, if it is not usual."""
    own = flags(TrainConfig)[label.replace("-", "_")]
    if member := own.members.get(value.partition("=")[0]):
        own, value = member, value.partition("=")[2]
    given = getattr(config, own.name)
    changed = given is True if own.kind is bool and not own.default else given != own.default
    text = f"{given:g}" if isinstance(given, float) else str(given)
    if not value:
        return own.label if changed else ""
    if value[0] == "!":
        return typed(config, own.name) if changed and text != value[1:] else ""
    parts = [key_of(part.partition("=")[0]) for part in text.split(",")]
    if value.partition("=")[0] not in parts:
        return ""
    return typed(config, own.name) if "=" in value else f"{own.label} {value}"


REMOVED = {
    "mlperf_log": "history.json and measurements.jsonl have its values",
    "compute": "--platform names a platform, which pydtnn calibrate measures",
    "balance": "--straggler-factor names slow ranks",
    "checkpoint_local": "checkpoints are written in the background",
    "checkpoint_local_every": "checkpoints are written in the background",
    "keep_every": "copy a checkpoint that is to remain",
    "timing_only": "python -m pydtnn oracle predicts the time of steps on any number of ranks",
    "stage": "copy the shards to a disk of each host before the start",
    "check_messages": "check_scheme compares the calls of ranks that are threads, and "
    "pydtnn trace flight those of a run that has failed",
    "class_balanced": "use --loss cross_entropy:class_weights=balanced",
}
"""Options of earlier versions, and what to use instead; only the last determines the training."""
