"""Predict the classes of images with a saved model: ``python -m pydtnn predict --help``."""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from pydtnn.data.folder import image_files
from pydtnn.data.images import KINDS, MODES, STORED, Decoder
from pydtnn.layers import Softmax
from pydtnn.model import Model
from pydtnn.saving import load
from pydtnn.utils.command import printing
from pydtnn.utils.errors import EXPLAINED, describe, requested_traceback
from pydtnn.utils.files import read_file, write_file
from pydtnn.utils.imports import import_object


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line per image; return the exit status, 0 on success.

    Parameters
    ----------
    arguments : sequence of str, optional
        Default: the arguments of this process.
    """
    options = create_parser().parse_args(arguments)
    try:
        with printing():
            classes = [import_object(where, "--custom") for where in options.custom]
            custom = {getattr(kind, "__name__", str(kind)): kind for kind in classes}
            model = load(options.model, backend=options.device, custom=custom)
            rows: list[list[object]] = []
            for path in chain.from_iterable(map(files_of, options.images)):
                names, scores = scores_of(model, read_image(path, model))
                line = f"{path}: {describe_classes(names, scores, options.top)}"
                print(line.replace("\n", "\\n"))
                best = [names[int(np.argmax(scores))]] if names else []
                rows.append([path, *best, *(f"{score:.6g}" for score in scores)])
            if options.csv:
                head, text = ["class", *names] if names else range(len(scores)), io.StringIO()
                csv.writer(text, lineterminator="\n").writerows([["image", *head], *rows])
                data = text.getvalue().encode(errors="surrogateescape")
                write_file("predict: --csv", options.csv, data)
    except EXPLAINED as error:
        print(f"{requested_traceback(error)}{describe(error)}", file=sys.stderr)
        return 1
    return 0


def create_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m pydtnn predict", description=__doc__)
    parser.add_argument(
        "model", help="folder that --save or Trainer.save wrote, or that of a run: its best weights"
    )
    parser.add_argument(
        "images",
        nargs="+",
        metavar="image",
        help=f"files or folders of {KINDS} images",
    )
    parser.add_argument("--top", type=int, default=1, help="classes to print for each image")
    parser.add_argument(
        "--csv", metavar="FILE", help="write a line per image with the probability of each class"
    )
    parser.add_argument("--device", default="cpu", help="backend: cpu, cuda or numpy")
    parser.add_argument(
        "--custom",
        action="append",
        default=[],
        metavar="FILE.py:CLASS",
        help="a layer that is not in the library; can be repeated",
    )
    return parser


def files_of(path: str) -> Iterable[str]:
    """Return the images in a folder, or the path of a file itself."""
    return image_files("predict", path) if Path(path).is_dir() else (path,)


def read_image(path: str, model: Model) -> np.ndarray:
    """Read an image with the size and the channels of a model's input, as `EncodedImages` does.

    Parameters
    ----------
    path : str
    model : Model

    Returns
    -------
    ndarray of uint8, shape ``(1, H, W, C)``

    Raises
    ------
    ValueError
        If the model has another kind of input, or the file is not an image.
    OSError
        If the file cannot be read.
    ImportError
        If Pillow is not installed.
    """
    shape = model.input_shapes[0]
    if len(model.input_shapes) != 1 or len(shape) != 3 or shape[-1] not in MODES:
        given = " and ".join(map(str, model.input_shapes))
        raise ValueError(
            f"predict: expected a model of images of shape (H, W, 1), (H, W, 3) or (H, W, 4), got "
            f"inputs of shape {given}; use pydtnn.load from Python"
        )
    height, width, channels = shape
    turned = model.inputs is None or model.inputs.encoding != STORED  # as in training
    decode = Decoder("predict", (height, width), channels, turned)
    return decode(read_file("predict", path), path)[None]


def scores_of(model: Model, x: Any) -> tuple[list[str], np.ndarray]:
    """Return the names of the classes, or their numbers, and their probabilities for one sample.

    Labels that are independent of each other have a probability each; a model of numbers has no
    names, and these.

    Raises
    ------
    ValueError
        If the outputs of the model are not scores of classes.
    """
    y = model.predict(x)
    if isinstance(y, tuple) and len({scores.shape for scores in y}) == 1:
        y = y[0]  # the others are auxiliary
    if isinstance(y, tuple) or y.ndim != 2:
        raise ValueError(
            "predict: expected a model with one output per class, got outputs of shape "
            f"{[node.shape for node in model.graph.outputs]}; use pydtnn.load from Python"
        )
    scores = y[0].astype(np.float64)
    task = model.inputs.tasks[0] if model.inputs is not None and model.inputs.tasks else ""
    if task == "numbers":
        return [], scores
    if len(scores) == 1:  # class 1 against class 0, see `Model.predict_classes`
        scores = np.array([0.0, scores[0]])
    last = {part.name: part.layer.kind for part in model.description.parts}
    if task == "labels" and y.shape[1] > 1:
        scores = 1 / (1 + np.exp(-scores))
    elif last.get(model.description.outputs[0]) is not Softmax:
        scores = np.exp(scores - scores.max())
        scores /= scores.sum()
    names = model.inputs.class_names if model.inputs is not None else None
    return [*(names or map(str, range(len(scores))))], scores


def describe_classes(names: Sequence[str], scores: np.ndarray, top: int) -> str:
    """Return the most likely classes with their probabilities: ``cat 0.98``; without names, all."""
    if not names:
        return ", ".join(f"{number:.6g}" for number in scores)
    order = np.argsort(-scores, kind="stable")[: max(top, 1)]
    return ", ".join(f"{names[k]} {scores[k]:.3g}" for k in order)


if __name__ == "__main__":
    sys.exit(main())
