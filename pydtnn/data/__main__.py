"""Images in shards, tokens of texts: ``python -m pydtnn.data --help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pydtnn.data.folder import OPTION, check_images
from pydtnn.data.packing import Packed, pack_shards, verify_shards
from pydtnn.data.text import TEST_SHARE, read_text
from pydtnn.data.tokenizer import train_tokenizer
from pydtnn.utils.command import Parser, run_subcommand, subcommands
from pydtnn.utils.machine import default_threads
from pydtnn.utils.units import parse_size

EXAMPLES = """examples:
  python -m pydtnn.data pack pictures --output shards
  python -m pydtnn.data check pictures
  python -m pydtnn.data verify shards
  python -m pydtnn.train --dataset shards:image_size=224 --data-dir shards
  python -m pydtnn.data tokenizer book.txt --vocabulary 4096 --output tokenizer.json
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments; return the exit status, see `run_subcommand`."""
    return run_subcommand("pydtnn.data", create_parser(), arguments)


def create_parser() -> Parser:
    """Return the parser of the command line."""
    parser, commands = subcommands(
        "pydtnn.data", "Check and pack images, verify shards, and train a tokenizer.", EXAMPLES
    )

    command = commands.add_parser("check", help="decode all images of a folder, name bad files")
    command.set_defaults(command=_check)
    command.add_argument("folder", type=Path, help="as for pack")

    command = commands.add_parser("pack", help="pack a folder of images, or continue to pack it")
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

    command = commands.add_parser("tokenizer", help="train a tokenizer of byte pairs on a text")
    command.set_defaults(command=_train_tokenizer)
    command.add_argument("text", type=Path, help="file or folder; the last tenth is not read")
    command.add_argument("--pattern", metavar="NAMES", help="files of a folder, such as *.txt")
    command.add_argument("--vocabulary", type=int, default=4096, metavar="N", help="default: 4096")
    command.add_argument("--output", type=Path, metavar="FILE", default=Path("tokenizer.json"))
    return parser


def _check(options: argparse.Namespace) -> None:
    count, problems = check_images("check", options.folder)
    for problem in problems:
        print(problem)
    if problems:
        raise ValueError(f"check: {len(problems)} problems beside {count:,} good images; {OPTION}")
    print(f"{options.folder}: {count:,} images can be read")


def _pack(options: argparse.Namespace) -> None:
    packed = pack_shards(
        options.folder,
        options.output,
        shard_bytes=parse_size("--shard-size", options.shard_size),
        test_fraction=options.test_fraction,
        skip_bad=options.skip_bad,
        threads=options.threads or default_threads(),
    )
    for part in packed:
        print(_describe(part))


def _describe(part: Packed) -> str:
    kept = f", of which {part.kept} were complete" if part.kept else ""
    return (
        f"{part.folder}: {part.samples:,} images in {part.shards} shard{'s' * (part.shards > 1)}"
        f"{kept}, {part.nbytes / 1e6:.1f} MB"
    )


def _train_tokenizer(options: argparse.Namespace) -> None:
    text, root = read_text(options.text, options.pattern)
    trained = text[: text.rfind(b"\n", 0, len(text) - len(text) // TEST_SHARE) + 1]
    found = train_tokenizer(trained, options.output, options.vocabulary, name=str(root))
    length = len(text) / max(len(found.encode(text, str(root))), 1)
    print(f"{options.output}: {found.size:,} tokens; a token of {root} has {length:.2f} bytes")


def _verify(options: argparse.Namespace) -> None:
    samples, shards = verify_shards(options.shards)
    print(f"{options.shards}: {samples:,} images in {shards} shards match their checksums")


if __name__ == "__main__":
    sys.exit(main())
