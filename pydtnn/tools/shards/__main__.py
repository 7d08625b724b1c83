"""Images in shards: ``python -m pydtnn data --help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pydtnn.tools.shards.packing import Packed, pack_shards, verify_shards
from pydtnn.utils.command import Parser, run_subcommand, subcommands
from pydtnn.utils.machine import default_threads
from pydtnn.utils.units import parse_quantity

EXAMPLES = """examples:
  python -m pydtnn data pack pictures --output shards
  python -m pydtnn data verify shards
  python -m pydtnn.train --dataset shards:image_size=224 --data-dir shards
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments; return the exit status, see `run_subcommand`."""
    return run_subcommand("pydtnn data", create_parser(), arguments)


def create_parser() -> Parser:
    """Return the parser of the command line."""
    parser, commands = subcommands("pydtnn data", "Pack images, and verify shards.", EXAMPLES)

    command = commands.add_parser("pack", help="pack a folder of images")
    command.set_defaults(command=_pack)
    command.add_argument(
        "folder", type=Path, help="images of each class in one sub-folder, or train and val of such"
    )
    command.add_argument("--output", type=Path, metavar="SHARDS", required=True)
    command.add_argument(
        "--shard-size", default="256MiB", metavar="SIZE", help="of the images (default: 256MiB)"
    )
    command.add_argument(
        "--test-fraction", type=float, metavar="X", help="test set of a folder without train"
    )
    command.add_argument("--skip-bad", action="store_true", help="omit files that are not images")
    command.add_argument("--threads", type=int, metavar="N", help="default: the cores")

    command = commands.add_parser("verify", help="compare all shards with their checksums")
    command.set_defaults(command=_verify)
    command.add_argument("shards", type=Path)
    return parser


def _pack(options: argparse.Namespace) -> None:
    packed = pack_shards(
        options.folder,
        options.output,
        shard_bytes=int(parse_quantity("--shard-size", options.shard_size, "B")),
        test_fraction=options.test_fraction,
        skip_bad=options.skip_bad,
        threads=options.threads or default_threads(),
    )
    for part in packed:
        print(_describe(part))


def _describe(part: Packed) -> str:
    return (
        f"{part.folder}: {part.samples:,} images in {part.shards} shard{'s' * (part.shards > 1)}"
        f", {part.nbytes / 1e6:.1f} MB"
    )


def _verify(options: argparse.Namespace) -> None:
    samples, shards = verify_shards(options.shards)
    print(f"{options.shards}: {samples:,} images in {shards} shards match their checksums")


if __name__ == "__main__":
    sys.exit(main())
