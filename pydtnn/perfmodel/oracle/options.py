"""The options of the oracle's command line, and what they describe."""

from __future__ import annotations

import argparse
from pathlib import Path

from pydtnn.optimizers import OPTIMIZER
from pydtnn.parallel.compression import COMPRESSOR
from pydtnn.parallel.mesh import parse_axes
from pydtnn.perfmodel.oracle.strategies import KINDS, Variants
from pydtnn.perfmodel.oracle.what_if import SWEEPS
from pydtnn.perfmodel.workload import Workload
from pydtnn.utils.command import HelpFormatter, Parser
from pydtnn.utils.names import unknown
from pydtnn.utils.units import parse_shape

EXAMPLES = """examples:
  python -m pydtnn.oracle --model resnet50 --shape 224,224,3 --platform cpu-10gbit \\
      --ranks 1-1024 --global-batch-size 1024
  python -m pydtnn.oracle --model resnet50 --shape 224,224,3 --platform cluster.yaml --ranks 64 \\
      --global-batch-size 1024 --compress top_k,power_sgd --top 10 --csv all.csv
  python -m pydtnn.oracle --model vgg16 --shape 224,224,3 --platform cpu-1gbit --ranks 16 \\
      --global-batch-size 256 --explain data=8,spatial=2
  python -m pydtnn.oracle --model alexnet --shape 224,224,3 --platform cpu-1gbit --ranks 16 \\
      --global-batch-size 256 --sweep bandwidth --plots plots
  python -m pydtnn.oracle --model alexnet --shape 224,224,3 --platform cpu-1gbit --ranks 4 \\
      --global-batch-size 64 --search plan.yaml
  python -m pydtnn.oracle ask --model resnet50 --platform cpu-10gbit --ranks 1-64 --step "1 s"
  python -m pydtnn.oracle --paradl alexnet.net --ranks 2-1024 --batch 512
"""


ESSENTIAL = (
    *("model", "shape", "classes", "platform", "ranks", "global_batch_size", "batch_size"),
    *("strategies", "top", "explain", "search", "sweep", "csv"),
)
"""Options that the short help page contains."""


def create_parser() -> Parser:
    """Return the parser of all options."""
    parser = Parser(
        "python -m pydtnn.oracle",
        usage="python -m pydtnn.oracle --model NAME --platform NAME [options]",
        description="Predict the training of a network with every strategy on a platform.",
        epilog=EXAMPLES,
        essential=ESSENTIAL,
        formatter_class=HelpFormatter,
    )
    add_run(parser)
    out = parser.add_argument_group("output")
    out.add_argument(
        "--top",
        type=int,
        default=1,
        metavar="N",
        help="strategies per number of ranks (default: 1)",
    )
    out.add_argument("--json", type=Path, metavar="FILE", help="write all predictions")
    out.add_argument("--csv", type=Path, metavar="FILE", help="write all predictions")
    out.add_argument("--plots", type=Path, metavar="FOLDER", help="draw plots (Matplotlib)")
    out.add_argument(
        "--explain",
        nargs="?",
        const="",
        metavar="AXES",
        help="print the terms of a prediction, such as data=4,spatial=2; of the best without AXES",
    )
    out.add_argument(
        "--search",
        nargs="?",
        const="",
        metavar="FILE",
        help="choose a plan for each layer; FILE receives that of the largest number of ranks",
    )
    out.add_argument("--sweep", metavar="AXIS", help=f"vary one property: {', '.join(SWEEPS)}")
    return parser


def add_run(parser: Parser) -> None:
    """Add the options that describe a network, a platform and what is tried."""
    what = parser.add_argument_group("network and training")
    what.add_argument("--model", required=True, metavar="NAME", help="or path/to/file.py:function")
    what.add_argument(
        *("--shape", "--input"),
        default="224,224,3",
        metavar="H,W,C",
        help="of a sample (default: 224,224,3)",
    )
    what.add_argument("--classes", type=int, default=1000, metavar="N", help="(default: 1000)")
    what.add_argument("--optimizer", default="sgd", metavar="NAME", help="(default: sgd)")
    what.add_argument("--dtype", default="float32", metavar="NAME", help="(default: float32)")
    what.add_argument(
        "--samples", type=int, default=1_280_000, metavar="N", help="of an epoch (default: 1280000)"
    )
    scale = parser.add_argument_group("platform and scaling")
    scale.add_argument("--platform", required=True, metavar="NAME", help="or a YAML file")
    scale.add_argument(
        "--ranks",
        default="1-64",
        metavar="N",
        help="2,4 or powers of two in 1-1024 (default: 1-64)",
    )
    scale.add_argument(
        *("--global-batch-size", "--global-batch"),
        type=int,
        metavar="N",
        help="samples of all ranks per step (default: 256)",
    )
    scale.add_argument(
        *("--batch-size", "--batch-per-rank"),
        type=int,
        metavar="N",
        help="instead: samples per rank and step, weak scaling",
    )
    scale.add_argument(
        "--peaks-only", action="store_true", help="ignore the platform's achieved rates of kernels"
    )
    tried = parser.add_argument_group("strategies")
    tried.add_argument(
        "--strategies", default=",".join(KINDS), metavar="NAMES", help="(default: %(default)s)"
    )
    tried.add_argument(
        "--compress", default="", metavar="NAMES", help="also with these compressors"
    )
    tried.add_argument(
        "--axes", type=int, default=1, metavar="N", help="axes besides data in hybrids (default: 1)"
    )
    tried.add_argument("--no-recompute", action="store_true", help="never recompute")
    tried.add_argument("--no-sharded", action="store_true", help="no sharded optimizer")


def workload_of(options: argparse.Namespace) -> Workload:
    """Return the run on one rank that the options describe.

    Raises
    ------
    ValueError
        If the model is unknown, or a number is out of range.
    """
    for name in ("classes", "samples", "global_batch_size", "batch_size", "axes", "top", "epochs"):
        value = getattr(options, name, None)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')}: expected at least 1, got {value}")
    if options.global_batch_size and options.batch_size:
        raise ValueError("--global-batch-size and --batch-size exclude each other; omit one")
    shape = parse_shape("--shape", options.shape)
    momentum = "momentum" in OPTIMIZER.find(options.optimizer).takes
    work = Workload(
        options.model,
        shape,
        options.classes,
        options.global_batch_size or options.batch_size or 256,
        samples=options.samples,
        dtype=options.dtype,
        optimizer=options.optimizer,
        optimizer_options={"momentum": 0.9} if momentum else {},
    )
    work.create_net()  # raises for an unknown model
    return work


def names_of(text: str) -> list[str]:
    """Return names between commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def variants_of(options: argparse.Namespace) -> Variants:
    """Return what is tried besides the axes.

    Raises
    ------
    ValueError
        If a compressor is unknown.
    """
    for name in names_of(options.compress):
        COMPRESSOR.find(name)
    return Variants(
        recompute=not options.no_recompute,
        sharded=not options.no_sharded,
        compress=names_of(options.compress),
    )


def axes_of(text: str) -> dict[str, int]:
    """Return the axes of a mesh with their ranks.

    >>> axes_of("spatial=2")
    {'data': 1, 'spatial': 2}
    """
    axes = parse_axes("--explain", text)
    for name in axes:
        if name not in KINDS:
            raise ValueError(f"--explain: {unknown('axis', name, KINDS)}")
    return {"data": 1, **axes}
