"""Random command lines of `pydtnn.train`: options that hold, and options that must be refused."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pydtnn.cli.config import Flag, TrainConfig, flags
from pydtnn.comm.schedules import SCHEDULES
from pydtnn.losses import LOSSES
from pydtnn.metrics import METRICS
from pydtnn.optimizers import OPTIMIZERS
from pydtnn.parallel.compression import COMPRESSORS
from pydtnn.parallel.schemes import SCHEMES
from pydtnn.schedules import SCHEDULES as RATES

DATA = '{"samples": 30, "test_samples": 9, "shape": [8, 8, 1], "classes": 3}'

ALWAYS = (
    *("--dataset-options", DATA, "--model", "mlp", "--epochs", "1", "--threads", "1"),
    *("--batch-size", "8"),
)
"""Small data and a small model, whatever else is drawn."""

BAD_NUMBERS = ["x", "-1", "nan", "inf", "-inf", "1e999", "[1]", "{}", "true", "1,5", "0.5.1", "٣x"]
BAD_WORDS = ["nonsense", "no such", "None:", "∞", "a:b:c", "x.py", "../x.py:y", "%s%n", "-1", "\0"]
BAD_OBJECTS = ["x", "[1]", "3", "{", '{"no_such_option": 1}', '{"name": 1}', '{"": 0}', "true"]

GOOD: dict[str, list[str]] = {
    "model": ["mlp", "mlp", "cnn"],
    "model_options": ["{}", '{"hidden": [3]}', '{"hidden": []}'],
    "dataset": ["synthetic"],
    "dataset_options": [DATA, DATA.replace("30", "11"), DATA.replace("3}", "2}")],
    "data_dir": ["."],
    "validation_split": ["0", "0.2", "0.99", "1e-9"],
    "augment": [
        *("", "none", "crop:1", "flip", "cutout:2", "crop:2,flip,cutout:3", "flip,,flip"),
        *("resized_crop:0.5:1:1.5,jitter:0.2", "randaugment:3:30,erasing"),
    ],
    "mixup": ["0.2", "1", "1e-3"],
    "cutmix": ["1", "30"],
    "epochs": ["1", "2"],
    "steps_per_epoch": ["1", "2"],
    "batch_size": ["1", "3", "8", "30"],
    "global_batch_size": ["1", "2", "7", "16", "30"],
    "accumulation": ["1", "2"],
    "loss": [*LOSSES, "CROSS-ENTROPY"],
    "label_smoothing": ["0", "0.1", "0.999"],
    "metrics": [*METRICS, "", "accuracy,top2_accuracy", "micro_f1,confusion_matrix", " top3 , "],
    "monitor": ["loss", "val_loss", "val_accuracy", "accuracy"],
    "early_stopping": ["1", "3"],
    "stop_at": ["0", "-5.5", "1e30", "0.5"],
    "shards": ["8", "1", "3", "13", "1000000000000"],
    "seed": ["0", "1", "12345678901"],
    "dtype": ["float32", "float64", "float32"],
    "optimizer": [*OPTIMIZERS, "SGD"],
    "lr": ["1e-3", "0.05", "1e-30"],
    "momentum": ["0", "0.5"],
    "weight_decay": ["0", "1e-2"],
    "clip_norm": ["1e-3", "1"],
    "optimizer_options": ["{}", '{"nesterov": true}', '{"epsilon": 1e-3}', '{"beta1": 0}'],
    "schedule": [*RATES, "one-cycle"],
    "schedule_options": ["{}", '{"rise": 0.5}', '{"boundaries": [1, 2]}', '{"final": 1e-3}'],
    "warmup_epochs": ["0", "0.5", "1"],
    "lr_base_batch": ["64", "8"],
    "plateau": ["1", "2"],
    "plateau_factor": ["0.1", "0.9"],
    "scheme": [*SCHEMES, "Local-SGD"],
    "scheme_options": ["{}", '{"period": 1}', '{"delay": 2}', '{"graph": "complete"}'],
    "compress": [*COMPRESSORS],
    "compress_options": ["{}", '{"share": 0.5}', '{"rank": 1}', '{"feedback": true}'],
    "allreduce": ["vendor", *SCHEDULES],
    "bucket_bytes": ["1", "100", "1000000000000"],
    "threads": ["1"],
    "loader_threads": ["0", "1", "3"],
    "output_dir": ["run", "deep/er/run", "run with space"],
    "save": ["weights.safetensors", "deep/weights.safetensors"],
    "checkpoint_epochs": ["0", "1", "5"],
    "checkpoint_steps": ["1", "2", "1000"],
    "keep": ["1", "2", "1000000"],
}
"""Values that hold by themselves, each of which ends in a moment."""

BAD: dict[str, list[str]] = {
    "model_options": ['{"hidden": -1}', '{"hidden": [0]}', '{"classes": 3}'],
    "dataset_options": ['{"samples": -1}', '{"shape": [8, 8]}', '{"classes": null}'],
    "data_dir": ["", "\0"],
    "validation_split": ["1", "2"],
    "augment": ["crop:0", "crop:1.5", "flip:2", "spin", "cutout:²", "jitter:1:1:1:1"],
    **{key: ["0", "-0.0"] for key in ("mixup", "lr", "clip_norm", "accumulation", "keep")},
    **{key: ["0", "1.5", "1e30"] for key in ("epochs", "steps_per_epoch", "batch_size")},
    "global_batch_size": ["0", "31", "99999999999999999999"],
    **{key: ["1", "1.5"] for key in ("label_smoothing", "momentum")},
    "metrics": ["accuracy,x", "top0", "top99999", "accuracy;loss"],
    "monitor": ["val_", "val_val_loss", "lr"],
    "plateau_factor": ["0", "1"],
    "threads": ["0", "9" * 400],
    "seed": ["9" * 400],
    "schedule_options": ['{"boundaries": ["a"]}', '{"rise": -1}'],
    "optimizer_options": ['{"nesterov": "often"}', '{"lr": 1}', '{"epsilon": 0}'],
    "save": [".", "/dev/null/w", "w\0"],
    "load": ["none.safetensors", ".", "/dev/null", "", "\0"],
    "output_dir": ["/proc/x", "/dev/null", "", "run\0"],
}
"""Values that must be refused, beside those that are of no kind at all."""


@dataclass(frozen=True)
class Line:
    """A command line.

    Attributes
    ----------
    arguments : tuple of str
    bad : tuple of str
        Those of them that must be refused.
    """

    arguments: tuple[str, ...]
    bad: tuple[str, ...]


def random_line(rng: np.random.Generator) -> Line:
    """Draw a command line; about half of them hold nothing that is bad by itself."""
    drawable = [own for own in flags(TrainConfig).values() if own.kind is bool or _good(own)]
    drawable = [own for own in drawable if own.name != "verbose"]  # it logs on the standard error
    chosen = [drawable[i] for i in rng.permutation(len(drawable))[: rng.integers(0, 7)]]
    if rng.random() < 0.05:
        chosen.append(flags(TrainConfig)["load"])  # of which only bad values are drawn
    rate = 0.0 if rng.random() < 0.5 else 0.5
    arguments: list[str] = []
    bad: list[str] = []
    for own in chosen:
        is_bad = own.name == "load" or rng.random() < rate
        words = _words(own, is_bad, rng)
        arguments += words
        bad += [" ".join(words)] * is_bad
    if rng.random() < 0.05:
        junk = str(rng.choice(["--no-such", "--epo=1", "word", "-x", "--", "--Epochs=1", "---"]))
        at = 0 if rng.random() < 0.5 else len(arguments)
        if at == 0 or junk != "--":
            arguments.insert(at, junk)
            bad.append(junk)
    return Line((*ALWAYS, *arguments), tuple(bad))


def _good(own: Flag) -> list[str]:
    if own.name in GOOD:
        return GOOD[own.name]
    return [c for c in own.choices if c not in ("cuda", "measure", "nccl")]


def _words(own: Flag, is_bad: bool, rng: np.random.Generator) -> list[str]:
    """Write an option with its value as it stands on the command line."""
    if own.kind is bool:
        both = [own.spelling, own.spelling.replace("--", "--no-")]
        flag = both[rng.integers(2)]
        return [f"{flag}={rng.choice(['1', 'x', '', 'maybe'])}"] if is_bad else [flag]
    values = _bad(own) if is_bad else _good(own)
    value = values[rng.integers(len(values))]
    return (
        [own.spelling, value]
        if rng.random() < 0.5 and value[:1] != "-"
        else [f"{own.spelling}={value}"]
    )


def _bad(own: Flag) -> list[str]:
    given = BAD.get(own.name, [])
    if own.kind in (int, float):  # one of which may be below 0
        return [*given, *(n for n in BAD_NUMBERS if (own.name, n) != ("stop_at", "-1"))]
    if own.name in ("output_dir", "save", "data_dir"):
        return given
    return [*given, *(BAD_OBJECTS if own.kind is dict else BAD_WORDS)]
