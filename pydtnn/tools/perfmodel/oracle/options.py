"""The options of the oracle's command line, and what they describe."""

from __future__ import annotations

import argparse
from pathlib import Path

from pydtnn.cli.workload import names_in
from pydtnn.model.pipeline.schedules import find
from pydtnn.model.recompute_choice import AUTO
from pydtnn.optimizers import OPTIMIZER
from pydtnn.parallel.compression import COMPRESSOR
from pydtnn.parallel.mesh import parse_axes
from pydtnn.tools.perfmodel.entries import check
from pydtnn.tools.perfmodel.oracle.ranking import KINDS, Variants
from pydtnn.tools.perfmodel.oracle.what_if import SWEEPS
from pydtnn.tools.perfmodel.search import SCHEDULES
from pydtnn.training.workload import Workload
from pydtnn.utils.command import HelpFormatter, Parser, add_value
from pydtnn.utils.units import parse_shape

EXAMPLES = """examples:
  python -m pydtnn oracle --model resnet50 --shape 224,224,3 --platform cpu-10gbit \\
      --ranks 1-1024 --global-batch-size 1024
  python -m pydtnn oracle --model resnet50 --shape 224,224,3 --platform cluster.yaml --ranks 64 \\
      --global-batch-size 1024 --compress top_k,power_sgd --top 10 --csv all.csv
  python -m pydtnn oracle --model vgg16 --shape 224,224,3 --platform cpu-1gbit --ranks 16 \\
      --global-batch-size 256 --explain data=8,spatial=2
  python -m pydtnn oracle --model alexnet --shape 224,224,3 --platform cpu-1gbit --ranks 16 \\
      --global-batch-size 256 --sweep bandwidth
  python -m pydtnn oracle --model alexnet --shape 224,224,3 --platform cpu-1gbit --ranks 4 \\
      --global-batch-size 64 --search plan.yaml
  python -m pydtnn oracle paper examples/papers/castello.yaml
"""


ESSENTIAL = (
    *("model", "shape", "classes", "platform", "ranks", "global_batch_size", "batch_size"),
    *("strategies", "top", "explain", "search", "sweep", "csv"),
)
"""Options that the short help page contains."""


def create_parser() -> Parser:
    """Return the parser of all options."""
    parser = Parser(
        "python -m pydtnn oracle",
        usage="python -m pydtnn oracle --model NAME --platform NAME [options]",
        description="Predict the training of a network with every strategy on a platform.",
        epilog=EXAMPLES,
        essential=ESSENTIAL,
        formatter_class=HelpFormatter,
    )
    parser.removed["ask"] = (
        "the table has the time and the hosts times hours (node h) of an epoch; training with "
        "--checkpoint-every auto chooses when checkpoints are written"
    )
    parser.removed["--plots"] = "--csv FILE writes all predictions, for any program that draws"
    parser.removed["--json"] = "--csv FILE writes the same predictions"
    what = parser.add_argument_group("network and training")
    add_value(what, "--model", "NAME", "or path/to/file.py:function")
    add_value(what, "--shape --input", "H,W,C", "of a sample", "224,224,3")
    add_value(what, "--classes", "N", default=1000)
    add_value(what, "--optimizer", "NAME", default="sgd")
    add_value(what, "--dtype", "NAME", default="float32")
    add_value(what, "--samples", "N", "of an epoch", 1_280_000)
    scale = parser.add_argument_group("platform and scaling")
    add_value(scale, "--platform", "NAME", "or a YAML file")
    add_value(scale, "--ranks", "N", "2,4 or powers of two in 1-1024", "1-64")
    text = "samples of all ranks per step (default: 256)"
    add_value(scale, "--global-batch-size --global-batch", "N", text, type=int)
    text = "instead: samples per rank and step, weak scaling"
    add_value(scale, "--batch-size --batch-per-rank", "N", text, type=int)
    text = "ignore the platform's achieved rates of kernels"
    scale.add_argument("--peaks-only", action="store_true", help=text)
    tried = parser.add_argument_group("strategies")
    add_value(tried, "--strategies", "NAMES", default=",".join(KINDS))
    tried.add_argument(
        "--compress", default="", metavar="NAMES", help="also with these compressors"
    )
    add_value(tried, "--axes", "N", "axes besides data in hybrids", 1)
    text = f"of pipelines, such as zb_v; {AUTO}: each of {len(SCHEDULES)}"
    add_value(tried, "--pipeline-schedule", "NAME", text, "1f1b")
    tried.add_argument("--no-recompute", action="store_true", help="never recompute")
    tried.add_argument("--no-sharded", action="store_true", help="no sharded schemes")
    commands = parser.add_subparsers(metavar="paper", prog="python -m pydtnn oracle")
    paper = commands.add_parser("paper", help="draw a figure that a file describes")
    text = "such as those of examples/papers; virtual ranks take minutes, virtual: 0 omits them"
    paper.add_argument("paper", metavar="FILE.yaml", type=Path, help=text)
    text = "picture: .png, .pdf or .svg; by default FILE.png in this folder"
    add_value(paper, "--output", "FILE", text, type=Path)
    add_value(paper, "--csv", "FILE", "write all predictions", type=Path)
    parser.set_defaults(paper=None)
    out = parser.add_argument_group("output")
    add_value(out, "--top", "N", "strategies per number of ranks", 1)
    add_value(out, "--csv", "FILE", "write all predictions", type=Path)
    optional = {"nargs": "?", "const": ""}
    text = "print the terms of a prediction, such as data=4,spatial=2; of the best without AXES"
    add_value(out, "--explain", "AXES", text, **optional)
    text = "choose a plan for each layer; FILE receives that of the largest number of ranks"
    add_value(out, "--search", "FILE", text, **optional)
    add_value(out, "--sweep", "NAMES", f"vary one property each: {', '.join(SWEEPS)}")
    return parser


def parse_ranks(text: str) -> list[int]:
    """Return numbers of ranks from a list, or the powers of two in a range.

    >>> parse_ranks("1-10"), parse_ranks("3,6")
    ([1, 2, 4, 8], [3, 6])
    """
    try:
        first, dash, last = text.partition("-")
        if dash:
            low, high = int(first), int(last)
            if not 0 < low <= high <= 2**20:
                raise ValueError(text)
            found = [2**n for n in range(21) if low <= 2**n <= high]
        else:
            found = [int(n) for n in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ValueError(f"--ranks: expected numbers such as 2,4 or 1-1024, got {text!r}")
    return found


def workload_of(options: argparse.Namespace) -> Workload:
    """Return the run on one rank that the options describe.

    Raises
    ------
    ValueError
        If the model is unknown, or a number is out of range.
    """
    for name in ("classes", "samples", "global_batch_size", "batch_size", "axes", "top"):
        value = getattr(options, name, None)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')}: expected at least 1, got {value}")
    if options.global_batch_size and options.batch_size:
        raise ValueError("--global-batch-size and --batch-size exclude each other; omit one")
    shape = parse_shape("--shape", options.shape)
    momentum = "momentum" in OPTIMIZER.find(options.optimizer).takes
    same = {name: getattr(options, name) for name in ("samples", "dtype", "optimizer")}
    same["optimizer_options"] = {"momentum": 0.9} if momentum else {}
    batch = options.global_batch_size or options.batch_size or 256
    work = Workload(options.model, shape, options.classes, batch, **same)
    work.create_net()  # raises for an unknown model
    return work


def variants_of(options: argparse.Namespace) -> Variants:
    """Return what is tried besides the axes.

    Raises
    ------
    ValueError
        If a compressor or a schedule is unknown.
    """
    compress, chosen = names_in(options.compress), options.pipeline_schedule
    for name in compress:
        COMPRESSOR.find(name)
    if chosen != AUTO:
        find(chosen)
    return Variants(
        recompute=not options.no_recompute,
        sharded=not options.no_sharded,
        compress=compress,
        schedules=SCHEDULES if chosen == AUTO else (chosen,),
    )


def axes_of(who: str, text: str) -> dict[str, int]:
    """Return the axes of a strategy with their ranks; ValueError if there is no such strategy.

    >>> axes_of("--explain", "spatial=2")
    {'data': 1, 'spatial': 2}
    """
    axes = parse_axes(who, text)
    for name in axes:
        check(who, "axis", name, KINDS)
    return {"data": 1, **axes}
