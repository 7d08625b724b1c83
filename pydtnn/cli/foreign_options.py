"""Names of options in other programs: those with the meaning of an option of ours, and answers.

Options may also be written with underscores: ``--batch_size``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

ALIASES = {
    "--learning-rate": "--lr",
    "--batch": "--batch-size",
    "--batchsize": "--batch-size",
    "--bs": "--batch-size",
    "--batch-per-rank": "--batch-size",
    "--global-batch": "--global-batch-size",
    "-b": "--batch-size",
    "--epoch": "--epochs",
    "--num-epochs": "--epochs",
    "--n-epochs": "--epochs",
    "--max-epochs": "--epochs",
    "--arch": "--model",
    "-a": "--model",
    "--net": "--model",
    "--network": "--model",
    "--img-size": "--image-size",
    "--input-size": "--image-size",
    "--dataset-dir": "--data-dir",
    "--data-path": "--data-dir",
    "--data-root": "--data-dir",
    "--output": "--output-dir",
    "--out": "--output-dir",
    "--out-dir": "--output-dir",
    "--logdir": "--output-dir",
    "--log-dir": "--output-dir",
    "--checkpoint-dir": "--output-dir",
    "--save-dir": "--output-dir",
    "--run-dir": "--output-dir",
    "--resume-from": "--resume",
    "--weights": "--load",
    "--optim": "--optimizer",
    "--opt": "--optimizer",
    "--wd": "--weight-decay",
    "--scheduler": "--schedule",
    "--lr-scheduler": "--schedule",
    "--lr-schedule": "--schedule",
    "--augmentation": "--augment",
    "--val-split": "--validation-split",
    "--eval": "--evaluate-only",
    "--evaluate": "--evaluate-only",
    "--eval-only": "--evaluate-only",
    "--criterion": "--loss",
    "--random-seed": "--seed",
    "--max-grad-norm": "--clip-norm",
    "--clip-grad-norm": "--clip-norm",
    "-v": "--verbose",
    "-q": "--quiet",
}
"""Names that are replaced: their meaning is exactly that of the option."""


class Answer(NamedTuple):
    """What to use instead of an option that does not exist.

    Attributes
    ----------
    use : str
        What to type, as options or as a whole command; "{value}" is the value that the user has
        set. Empty if the option must be omitted.
    example : str
        Placeholder for that value, if the user has set none.
    why : str
        Explanation that follows.
    """

    use: str
    example: str = ""
    why: str = ""


_RANKS = Answer("mpirun -np {value} python -m pydtnn.train", "4", "each rank is a process")
_GPUS = Answer(
    "mpirun -np {value} python -m pydtnn.train --device cuda", "4", "each rank has a GPU"
)
_HALF = Answer("--dtype float16", why="--dtype bfloat16 needs no loss scaling")
_WORKERS = Answer("--loader-threads {value}", "2", "batches are prepared by threads")
_TRANSPORT = Answer("--device cuda --comm nccl", why="arrays in host memory are sent by MPI")
_RANK = Answer("", why="mpirun or srun sets the rank of each process")
_CLIP = Answer("--clip-norm {value}", "1.0", "it limits the global norm of the gradient")
_ACCUMULATION = Answer(
    "--accumulation {value}",
    "2",
    "it divides the batch of a rank into micro-batches and does not change the number of samples "
    "of a step",
)
_RECOMPUTED = Answer("--recompute auto", why="--memory-limit 2GiB limits what is recomputed")
_SHOWN = Answer("--progress plain", why="a line is printed after every epoch and every 10 s")
_LOGGED = Answer("--tensorboard", why="history.csv in the run's folder has every epoch")
_SAVED = Answer("--checkpoint-epochs {value}", "1", "--checkpoint-steps counts steps")
_SHUFFLED = Answer("", why="training samples are shuffled in every epoch")
_DECAYED = Answer(
    "--schedule step --schedule-options.gamma {value}", "0.1", "--schedule cosine needs no options"
)
_NAME = Answer("--output-dir runs/{value}", "NAME", "a run has the name of its folder")
_EVALUATED = Answer(
    "--validation-split 0.1", why="without it, the test set is evaluated after every epoch"
)
_MEASURED = Answer("--verbose", why="the report at the end of a run contains the time by activity")

ANSWERS = {
    "-e": Answer("--epochs {value}", "3", "--evaluate-only evaluates weights"),
    "-j": _WORKERS,
    "-np": _RANKS,
    "-n": _RANKS,
    "--np": _RANKS,
    "--nproc": _RANKS,
    "--nproc-per-node": _RANKS,
    "--ranks": _RANKS,
    "--world-size": _RANKS,
    "--rank": _RANK,
    "--local-rank": _RANK,
    "--gpus": _GPUS,
    "--ngpus": _GPUS,
    "--num-gpus": _GPUS,
    "--gpu": Answer("--device cuda", why="CUDA_VISIBLE_DEVICES=1 selects a GPU of several"),
    "--cuda": Answer("--device cuda"),
    "--use-cuda": Answer("--device cuda"),
    "--cpu": Answer("--device cpu", why="this is the default"),
    "--no-cuda": Answer("--device cpu", why="this is the default"),
    "--fp16": _HALF,
    "--half": _HALF,
    "--bf16": Answer("--dtype bfloat16"),
    "--amp": Answer("--dtype bfloat16", why="--dtype float16 scales the loss automatically"),
    "--precision": Answer("--dtype bfloat16", why="or float16, float32, float64"),
    "--mixed-precision": Answer("--dtype bfloat16", why="or float16, with a loss scale"),
    "--workers": _WORKERS,
    "--num-workers": _WORKERS,
    "--data": Answer("--dataset {value}", "cifar10", "--data-dir sets the folder of the data"),
    "--checkpoint": Answer("--resume {value}", "FOLDER", "--load reads a file of weights only"),
    "--pretrained": Answer("--load {value}", "FILE", "weights are read from a file"),
    "--nesterov": Answer("--optimizer-options.nesterov true"),
    "--warmup": Answer("--warmup-epochs {value}", "1", "it may be a fraction of an epoch"),
    "--warmup-steps": Answer("--warmup-epochs {value}", "1", "it may be a fraction of an epoch"),
    "--deterministic": Answer(
        "", why="a run repeats its bytes; --exact makes them independent of the number of ranks"
    ),
    "--validation": _EVALUATED,
    "--val": _EVALUATED,
    "--test": Answer("--evaluate-only --load {value}", "FILE", "--resume FOLDER takes a run's"),
    **dict.fromkeys(
        ("--wandb", "--use-wandb", "--wandb-project", "--mlflow", "--comet", "--logger"), _LOGGED
    ),
    "--patience": Answer("--early-stopping {value}", "5", "--plateau reduces the learning rate"),
    "--run-name": _NAME,
    "--name": _NAME,
    "--profile": _MEASURED,
    "--profiler": _MEASURED,
    "--debug": Answer("--verbose", why="PYDTNN_TRACEBACK=1 adds tracebacks to errors"),
    "--backend": _TRANSPORT,
    "--dist-backend": _TRANSPORT,
    "--compile": Answer("", why="kernels are compiled when the package is installed"),
    "--clip": _CLIP,
    "--grad-clip": _CLIP,
    "--clip-grad": _CLIP,
    "--gradient-clip": _CLIP,
    "--accumulate": _ACCUMULATION,
    "--grad-accumulation-steps": _ACCUMULATION,
    "--activation-checkpointing": _RECOMPUTED,
    "--gradient-checkpointing": _RECOMPUTED,
    "--grad-checkpointing": _RECOMPUTED,
    "--gradient-accumulation-steps": _ACCUMULATION,
    "--accumulation-steps": _ACCUMULATION,
    **dict.fromkeys(
        ("--print-freq", "--log-freq", "--log-every", "--log-interval", "--log-every-n-steps"),
        _SHOWN,
    ),
    **dict.fromkeys(("--save-every", "--save-freq", "--checkpoint-every"), _SAVED),
    **dict.fromkeys(("--eval-every", "--eval-freq", "--val-every"), _EVALUATED),
    **dict.fromkeys(("--shuffle", "--no-shuffle"), _SHUFFLED),
    **dict.fromkeys(("--lr-decay", "--gamma", "--lr-gamma", "--lr-step"), _DECAYED),
    "--min-lr": Answer("--schedule cosine --schedule-options.final {value}", "1e-5"),
    "--dropout": Answer(
        "--model-options.dropout {value}", "0.1", "of models that have it, such as gpt_nano"
    ),
    "--num-classes": Answer("", why="the data set has the number of classes"),
    "--gpu-id": Answer("--device cuda", why="CUDA_VISIBLE_DEVICES=1 selects a GPU of several"),
    "--pin-memory": Answer("", why="batches are prepared in pinned memory on GPUs"),
    "--dry-run": Answer("--epochs 1 --steps-per-epoch 1", why="it trains one step"),
    "--list-models": Answer("--model {value}", "NAME", "the models are {models}"),
    "--models": Answer("--model {value}", "NAME", "the models are {models}"),
    "--list-datasets": Answer("--dataset {value}", "NAME", "the data sets are {datasets}"),
    "--datasets": Answer("--dataset {value}", "NAME", "the data sets are {datasets}"),
}
"""Answers to names that are refused, because their meaning differs or depends on the program."""


def translate(arguments: Sequence[str], known: Sequence[str]) -> Iterator[str]:
    """Replace names of other programs, and underscores in names, in a command line.

    Parameters
    ----------
    arguments : sequence of str
    known : sequence of str
        The options of the parser, such as "--lr".

    Raises
    ------
    ValueError
        For a name in `ANSWERS`; the message contains what to type.
    """
    for number, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        flag, dot, item = name.partition(".")
        if not flag.startswith("-") or flag in known:
            yield argument
            continue
        flag = flag.replace("_", "-")
        if flag in ANSWERS and flag not in known:
            following = [a for a in arguments[number + 1 : number + 2] if not a.startswith("-")]
            raise ValueError(_refusal(flag, value if equals else "".join(following)))
        yield ALIASES.get(flag, flag) + dot + item + equals + value


def _refusal(flag: str, value: str) -> str:
    """Return the message for an option that does not exist."""
    use, example, why = ANSWERS[flag]
    advice = f"use {use}".replace("{value}", value or example) if use else "omit it"
    if "{" in why:
        from pydtnn.cli.parts import PARTS

        for part in ("model", "dataset"):
            why = why.replace(f"{{{part}s}}", ", ".join(PARTS[part].registry))
    return f"train: there is no option {flag}; {advice}{f' ({why})' if why else ''}"
