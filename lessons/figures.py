"""Pictures of what the lessons compute; they need Matplotlib.

    python lessons/figures.py [FOLDER]

writes schedules.png (lessons 20 to 22), bytes.png (what rank 0 sends by the lessons' formulas) and
losses.png (lessons 08 to 10, trained for longer).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

import nets
from check import lesson
from pipelines import MICRO_BATCHES, ends

COLORS = {"F": "#4477aa", "B": "#ee8866", "W": "#bbcc33"}


def schedules(ranks: int = 4) -> Figure:
    """Draw what the ranks of three pipelines do, on one scale: F and half of a backward take 1."""
    figure, rows = plt.subplots(3, figsize=(8, 5.4), sharex=True, layout="constrained")
    names = ("20", "gpipe", 2), ("21", "one_forward_one_backward", 2), ("22", "zero_bubble", 1)
    for axes, (number, name, backward) in zip(rows, names, strict=True):
        schedule = getattr(lesson(number), name)
        seconds = {"F": 1, "B": backward, "W": 1}
        begins = ends([schedule(rank, ranks, MICRO_BATCHES) for rank in range(ranks)], seconds)
        for rank, actions in enumerate(begins):
            for begin, (kind, i) in actions:
                axes.barh(rank, seconds[kind], 0.9, begin, color=COLORS[kind], edgecolor="white")
                axes.text(begin + seconds[kind] / 2, rank, f"{i}", ha="center", va="center")
        end = max(begin + seconds[kind] for row in begins for begin, (kind, _) in row)
        busy = sum(seconds[kind] for row in begins for _, (kind, _) in row)
        axes.set_title(
            f"{name.replace('_', ' ')}: {1 - busy / end / ranks:.0%} bubbles", loc="left"
        )
        axes.set(yticks=range(ranks), ylabel="rank")
        axes.invert_yaxis()
    rows[-1].set_xlabel("time of a forward pass")
    words = {"F": "forward", "B": "backward", "W": "gradients of parameters, apart"}
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLORS[kind], label=words[kind]) for kind in words]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def volumes() -> Figure:
    """Draw the bytes that rank 0 sends in a step against the number of ranks."""
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    sizes = np.arange(2, 17)
    names = {"05": "recursive doubling", "13": "ZeRO 3", "02": "ring, ZeRO 1 and 2"}
    names |= {"10": "largest tenth, gathered", "08": "local SGD, H = 3"}
    for (number, name), marker in zip(names.items(), "sv.xd", strict=True):
        sent = [lesson(number).bytes_sent(int(size)) / nets.STEPS / 1e3 for size in sizes]
        axes.plot(sizes, sent, marker=marker, label=f"{number} {name}")
    axes.set(xlabel="ranks", ylabel="kB that rank 0 sends in a step", ylim=(0, None))
    figure.legend(loc="outside right upper")
    return figure


def loss_of(number: str, steps: int, **settings: Any) -> tuple[float, float]:
    """Return bytes and loss on other samples after steps of a lesson on four ranks."""
    with mock.patch.multiple(lesson(number), STEPS=steps, **settings):
        params = nets.split(lesson(number).serial(4), nets.parameters())
        loss, _ = nets.gradients(params, *nets.batch(10_000, 400))
        return lesson(number).bytes_sent(4), loss / 400


def losses(most: int = 96) -> Figure:
    """Draw losses of lessons 08 to 10 on four ranks against steps, and against bytes."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), sharey=True, layout="constrained")
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "sum in each step": ("08", {"PERIOD": 1}),
        "local SGD, H = 12": ("08", {"PERIOD": 12}),
        "DiLoCo, H = 12": ("09", {"PERIOD": 12}),
        "largest tenth": ("10", {"SHARE": 0.1}),
        "largest hundredth": ("10", {"SHARE": 0.01}),
    }
    for (name, (number, settings)), marker in zip(kinds.items(), ".sdxv", strict=True):
        steps = range(12, most + 1, 12)
        sent, loss = zip(*(loss_of(number, n, **settings) for n in steps), strict=True)
        left.plot(steps, loss, marker=marker, label=name)
        right.plot(np.array(sent) / 1e3, loss, marker=marker)
    left.set(xlabel="steps", ylabel="loss on other samples", yscale="log", xlim=(0, None))
    right.set(xlabel="kB that rank 0 has sent", xscale="log")
    left.legend()
    return figure


def main() -> None:
    """Draw all pictures."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path())
    folder = parser.parse_args().folder
    for name, draw in {"schedules": schedules, "bytes": volumes, "losses": losses}.items():
        draw().savefig(folder / f"{name}.png", dpi=80)


if __name__ == "__main__":
    main()
