"""Accuracy against virtual time: ways to train ResNet-8 on CIFAR-10 on 64 virtual ranks.

    python -m benchmarks.virtual --output virtual.png              # about 25 minutes on 2 cores
    python -m benchmarks.virtual --epochs 1 --steps 3              # a minute, to try it

Each way is a run of `python -m pydtnn.train --virtual-ranks`, whose history has the virtual time of
every epoch. An epoch is a quarter of a pass over the samples, so that curves have more points.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pydtnn.tools.schedules.figures import INK, LINE, PALETTE, QUIET, STYLE

COLORS = (PALETTE[0], PALETTE[4], PALETTE[7], PALETTE[2])

WAYS = {
    "all-reduce": ["--lr=0.2"],
    "top-k": ["--lr=0.2", "--compress=topk:share=0.01"],
    "local SGD": ["--lr=0.1", "--scheme=local_sgd:period=8"],
    "gossip": ["--lr=0.1", "--scheme=gossip"],
}
"""Options of each way to train."""


def train(name: str, folder: Path, given: argparse.Namespace) -> list[dict[str, float]]:
    """Train in one way; return its history."""
    command = [
        *(sys.executable, "-m", "pydtnn.train", "--model=resnet8", f"--dataset={given.dataset}"),
        *(f"--virtual-ranks={given.ranks}", f"--platform={given.platform}", "--quiet"),
        *(f"--batch-size={given.batch}", f"--epochs={given.epochs}", "--augment=crop:4,flip"),
        *(
            f"--steps-per-epoch={given.steps}",
            "--checkpoint-every=:epochs=0",
            "--warmup-epochs=0.5",
        ),
        *WAYS[name],
        f"--output-dir={folder}",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return list(json.loads((folder / "history.json").read_text()))


def draw(histories: dict[str, list[dict[str, float]]], title: str, note: str, path: str) -> None:
    """Draw a curve for each way, with its name at its end, in the style of the other pictures."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 4.6))
        axes = figure.add_axes((0.07, 0.12, 0.8, 0.7))
        figure.text(0.07, 0.94, title, size=12, weight="bold", color=INK, va="center")
        figure.text(0.07, 0.88, note, color=QUIET, va="center")
        for color, (name, history) in zip(COLORS, histories.items(), strict=False):
            times = [epoch["virtual_seconds"] for epoch in history]
            values = [100 * epoch["val_accuracy"] for epoch in history]
            axes.plot(times, values, "o-", color=color, ms=3, lw=1.4)
            axes.annotate(
                name,
                (times[-1], values[-1]),
                (7, 0),
                textcoords="offset points",
                color=color,
                weight="bold",
                va="center",
                annotation_clip=False,
            )
        axes.set_xlabel("virtual time (s)", color=QUIET)
        axes.set_ylabel("validation accuracy (%)", color=QUIET)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(color=LINE, lw=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(length=0, labelcolor=QUIET)
        axes.spines[:].set_visible(False)
        figure.savefig(path, dpi=200)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--platform", default="cpu-1gbit")
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--batch", type=int, default=8, help="samples per rank and step")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=24, help="per epoch")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--output", help="file of the picture")
    given = parser.parse_args()
    histories = {}
    print(f"{'way':12} {'ms/step':>8} {'virtual s':>10} {'accuracy':>9} {'real s':>7}")
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(given.ways):
            begin = time.perf_counter()
            history = histories[name] = train(name, Path(folder) / str(number), given)
            real, last = time.perf_counter() - begin, history[-1]
            step = (last["virtual_seconds"]) / (given.epochs * given.steps)
            print(
                f"{name:12} {1e3 * step:8.2f} {last['virtual_seconds']:10.3f} "
                f"{last['val_accuracy']:9.4f} {real:7.1f}",
                flush=True,
            )
    if given.output:
        title = f"ResNet-8 on {given.ranks} virtual ranks of {given.platform}"
        note = (
            f"{given.dataset}, {given.epochs * given.steps} steps of {given.batch} samples per "
            f"rank; a point every {given.steps} steps"
        )
        draw(histories, title, note, given.output)


if __name__ == "__main__":
    main()
