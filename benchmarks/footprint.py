"""How much of the library a training visits, counted on a run of ``python -m pydtnn.train``.

Three numbers, of one rank: files of the package that run from the start of the process to the first
step, files that a step visits, and the deepest stack of a step, in Python frames from
`Trainer.train_step` or what `fit` calls in its place. They say what a reader must hold in mind.

::

    python -m benchmarks.footprint
    mpirun -np 2 python -m benchmarks.footprint
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGE = Path(__file__).parents[1] / "pydtnn"

STEP = "_begin"
"""The method of `Trainer` that runs a step."""

COUNTED_STEP = 2
"""The step that is counted, from 0: by then all lazy imports and measurements are done."""

RUN = (
    *("--model", "resnet20", "--dataset", "synthetic"),
    *("--epochs", "1", "--steps-per-epoch", "4", "--batch-size", "8"),
)


class Footprint:
    """A profile function that counts files of the package and the depth of the stack.

    Attributes
    ----------
    start, step : set of str
        Files, relative to the package, that ran before the first step and in the counted step.
    deepest : list of str
        Functions on the deepest stack of the counted step, the outermost first.
    """

    def __init__(self) -> None:
        self.start: set[str] = set()
        self.step: set[str] = set()
        self.deepest: list[str] = []
        self.steps = 0
        self.outermost: FrameType | None = None
        self.names: dict[CodeType, str] = {}

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event == "return" and frame is self.outermost:
            self.outermost = None
            self.steps += 1
        if event != "call":
            return
        code = frame.f_code
        name = self.names.get(code)
        if name is None:
            path = Path(code.co_filename)
            name = str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else ""
            self.names[code] = name
        if name == "training/trainer.py" and code.co_name == STEP:
            self.outermost = frame
        if self.steps == 0 and self.outermost is None and name:
            self.start.add(name)
        if self.steps == COUNTED_STEP and self.outermost is not None:
            if name:
                self.step.add(name)
            self.measure(frame)

    def measure(self, frame: FrameType) -> None:
        """Keep the stack of this frame if it is the deepest so far."""
        stack = []
        inner: FrameType | None = frame
        while inner is not None:
            stack.append(inner)
            if inner is self.outermost:
                break
            inner = inner.f_back
        if inner is not None and len(stack) > len(self.deepest):
            self.deepest = [
                f"{Path(f.f_code.co_filename).name}:{f.f_code.co_qualname}" for f in reversed(stack)
            ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.footprint", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the files and the stack, too")
    parser.add_argument("run", nargs="*", help="options of pydtnn.train, after --")
    options = parser.parse_args(arguments)
    footprint = Footprint()
    # Ranks of a host have one parent, so all of them name the same folder.
    folder = Path(tempfile.gettempdir()) / f"pydtnn-footprint-{os.getppid()}"
    sys.setprofile(footprint)
    try:
        from pydtnn.train import main as train

        code = train([*(options.run or RUN), "--output-dir", str(folder)])
    finally:
        sys.setprofile(None)
    from pydtnn.comm import create_communicator

    if create_communicator("auto").rank:
        return code
    shutil.rmtree(folder, ignore_errors=True)
    if code == 0:
        if options.list:
            print("files before the first step:", *sorted(footprint.start), sep="\n  ")
            print("files of a step:", *sorted(footprint.step), sep="\n  ")
            print("deepest stack of a step:", *footprint.deepest, sep="\n  ")
        print(f"files from the start of the process to the first step: {len(footprint.start)}")
        print(f"files that a step visits: {len(footprint.step)}")
        print(f"deepest stack of a step: {len(footprint.deepest)} frames")
    return code


if __name__ == "__main__":
    sys.exit(main())
