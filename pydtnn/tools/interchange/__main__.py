"""Convert weights and networks of other programs: ``python -m pydtnn interchange --help``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydtnn.model import Model
from pydtnn.models import create_net
from pydtnn.saving import check_replaceable, load, save_model
from pydtnn.tools.interchange import (
    export_onnx,
    import_onnx,
    load_keras_weights,
    load_state_dict,
    save_state_dict,
)
from pydtnn.tools.interchange.keras import SUFFIXES
from pydtnn.tools.interchange.onnx.importing import can_verify
from pydtnn.tools.interchange.published_names import LIBRARIES
from pydtnn.utils.command import Parser, run_subcommand, subcommands
from pydtnn.utils.units import parse_shape

ONNX = ".onnx"

EXAMPLES = """examples:
  python -m pydtnn interchange import resnet18.pth resnet18.pydtnn --model resnet18 \\
      --shape 224,224,3 --classes 1000
  python -m pydtnn interchange import network.onnx network.pydtnn
  python -m pydtnn interchange export resnet18.pydtnn resnet18.pt --like torchvision.pth
  python -m pydtnn interchange export resnet18.pydtnn resnet18.onnx --normalize
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments; return the exit status, see `run_subcommand`."""
    return run_subcommand("pydtnn interchange", create_parser(), arguments)


def create_parser() -> Parser:
    """Return the parser of the command line."""
    parser, commands = subcommands(
        "pydtnn interchange", "Convert weights and networks of other programs.", EXAMPLES
    )
    importing = commands.add_parser(
        "import", help="make a folder, as --save writes, from weights or an ONNX file"
    )
    importing.add_argument(
        "source", help=".safetensors, .pt, .pth, .bin, .ckpt, .keras, .h5 or .onnx"
    )
    importing.add_argument("folder", help="of the saved model, which pydtnn.load reads")
    importing.add_argument("--model", help="network of the weights: a name or path/to/file.py:f")
    importing.add_argument(
        "--model-options", type=_options, default={}, metavar="JSON", help='{"shortcut": "A"}'
    )
    importing.add_argument("--shape", metavar="H,W,C", help="of its input")
    importing.add_argument("--classes", type=int, help="number of its outputs")
    importing.add_argument(
        "--partial",
        action="store_true",
        help="load the arrays that fit; others keep their initial values",
    )
    importing.add_argument(
        "--no-verify",
        action="store_true",
        help="do not compare the outputs of an ONNX file's network with those of onnxruntime",
    )
    importing.set_defaults(command=_import)
    exporting = commands.add_parser(
        "export", help="write a saved model's weights as a state dict, or its network as ONNX"
    )
    exporting.add_argument("folder", help="that --save or Trainer.save wrote")
    exporting.add_argument("target", help=".safetensors, .pt, .pth, .bin, .ckpt or .onnx")
    exporting.add_argument(
        "--like", metavar="FILE", help="state dict whose names and order the result has"
    )
    exporting.add_argument(
        "--names",
        choices=LIBRARIES,
        help="library whose names and layouts the state dict has, such as hugging_face for GPTs",
    )
    exporting.add_argument(
        "--normalize",
        action="store_true",
        help="let the graph of an ONNX file normalise, so that raw pixels are its input",
    )
    exporting.set_defaults(command=_export)
    return parser


def _import(options: argparse.Namespace) -> None:
    needed = (options.model, options.shape, options.classes)
    check_replaceable("import", Path(options.folder))
    if Path(options.source).suffix == ONNX:
        if any(needed) or options.partial:
            raise ValueError(
                "import: an ONNX file contains the network; omit --model, --shape, --classes and "
                "--partial"
            )
        verify = not options.no_verify
        model = import_onnx(options.source, verify=verify and can_verify())
        if verify:
            compared = "outputs are those of onnxruntime"
            print(compared if can_verify() else "not compared: onnxruntime is not installed")
    elif options.no_verify:
        raise ValueError("import: --no-verify is for ONNX, not for weights; omit it")
    elif not all(needed):
        raise ValueError(
            "import: weights contain no network; give it by --model, --shape and --classes"
        )
    else:
        shape = parse_shape("--shape", options.shape)
        net = create_net(options.model, options.classes, shape, **options.model_options)
        model = Model(net, shape)
        keras = Path(options.source).suffix in SUFFIXES
        read = load_keras_weights if keras else load_state_dict
        print(read(model, options.source, strict=not options.partial))
    save_model(model, options.folder)
    print(f"wrote {options.folder}: {model.whole.describe()}")


def _export(options: argparse.Namespace) -> None:
    model = load(options.folder)
    if Path(options.target).suffix == ONNX:
        if options.like or options.names:
            raise ValueError(
                "export: --like and --names are for state dicts, not for ONNX; omit them"
            )
        export_onnx(model, options.target, normalize=options.normalize)
        if model.dtype.itemsize == 2:
            print(f"numbers are float32: outputs differ by the rounding of the {model.dtype} model")
    elif options.normalize:
        raise ValueError("export: --normalize is for ONNX, not for state dicts; omit it")
    else:
        save_state_dict(model, options.target, like=options.like, names=options.names)
    print(f"wrote {options.target}: {model.whole.describe()}")


def _options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise argparse.ArgumentTypeError(f'expected JSON like {{"shortcut": "A"}}, got {text!r}')
    return options


if __name__ == "__main__":
    sys.exit(main())
