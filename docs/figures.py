"""Draw pictures of the manual: ``python docs/figures.py exactness docs/pictures/exactness.png``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from PIL import Image

import pydtnn
from pydtnn import Model, Trainer, create_backend, load_dataset, run_threads
from pydtnn.callbacks import Callback, FunctionCallback
from pydtnn.comm.serial import Serial
from pydtnn.comm.traffic import Traffic
from pydtnn.data import ArrayDataset
from pydtnn.models import create_net
from pydtnn.optimizers import SGD, AdamW, Lion, Muon
from pydtnn.parallel.compression import create_sums
from pydtnn.parallel.exchange import AllReduce
from pydtnn.parallel.reproducible import ExactSums
from pydtnn.parallel.schemes import DiLoCo, ElasticAveraging, Gossip, LocalSGD, StaleGradients
from pydtnn.schedules import get_schedule
from pydtnn.tools.comparison import DecoupledDiLoCo, NoLoCo, demo
from pydtnn.tools.perfmodel.compute.analytic import AnalyticCosts
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.tools.perfmodel.virtual import Processor, run_virtual
from pydtnn.tools.perfmodel.virtual.disturbances import Disturbances, Straggler
from pydtnn.tools.schedules.figures import BAND, INK, LINE, PALETTE, QUIET, STYLE
from pydtnn.tools.tracing import load_timeline
from pydtnn.training.nonfinite import NotFiniteError
from pydtnn.utils import clock
from pydtnn.utils.observer import Kind

SIZE = (7.2, 4.2)
"""Inches of a picture with two axes."""

EPOCHS = {"schemes": 8, "exactness": 4, "rare": 8, "decoupled": 12, "muon": 400, "seeds": 3}
"""Epochs of the trainings of a picture, steps and seeds of `muon`; tests draw them with fewer."""


def plain(axes: Axes, x: str, y: str) -> None:
    """Labels and a light grid, in the style of the other pictures."""
    axes.set_xlabel(x, color=QUIET)
    axes.set_ylabel(y, color=QUIET)
    axes.grid(color=LINE, lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelcolor=QUIET)
    axes.spines[:].set_visible(False)


def name_curve(axes: Axes, x: float, y: float, name: str, color: str) -> None:
    """Write the name of a curve at its end."""
    axes.annotate(
        *(name, (x, y), (7, 0)),
        **{"textcoords": "offset points", "color": color, "weight": "bold", "va": "center"},
        annotation_clip=False,
    )


class Steps(Callback):
    """Keep something of every step."""

    def __init__(self, look: Callable[[Any], Any]) -> None:
        self.look, self.found = look, []

    def on_step_end(self, trainer: Any) -> None:
        self.found.append(self.look(trainer))


# -- schemes --------------------------------------------------------------------------------------

SCHEMES: dict[str, Callable[..., Any]] = {
    "all-reduce": AllReduce,
    "all-reduce, top 5 %": partial(AllReduce, sums=create_sums("top_k", share=0.05)),
    "all-reduce, PowerSGD": partial(AllReduce, sums=create_sums("power_sgd")),
    "stale by 1": StaleGradients,
    "local SGD, 8": LocalSGD,
    "local SGD, 32": partial(LocalSGD, period=32),
    "gossip": Gossip,
    "elastic averaging": ElasticAveraging,
}


def schemes(figure: Figure) -> None:
    """Accuracy of a small network over the bytes that a rank has sent, for several schemes."""
    train, test = load_dataset("digits")

    def rank(scheme: Callable[..., Any], comm: Any) -> list[tuple[float, float]]:
        model = Model(create_net("cnn", train.classes, train.input_shape), train.input_shape)
        rule = SGD(0.05, momentum=0.9)
        trainer = Trainer(model, rule, exchange=scheme(comm), progress=False)
        found, sent = [], 0
        for _ in range(EPOCHS["schemes"]):
            before = comm.traffic.bytes
            trainer.fit(train, more_epochs=1, global_batch_size=64)
            sent += comm.traffic.bytes - before
            found.append((sent / 1e6, 100 * trainer.evaluate(test)["accuracy"]))
        return found

    axes = figure.add_subplot()
    for (name, scheme), color in zip(SCHEMES.items(), PALETTE, strict=True):
        sent, accuracy = zip(*run_threads(4, partial(rank, scheme))[0], strict=True)
        axes.semilogx(sent, accuracy, "o-", color=color, ms=3, lw=1.4, label=name)
    axes.legend(frameon=False, fontsize=8, labelcolor="linecolor", loc="lower right")
    words = f"CNN on digits, 4 ranks, {EPOCHS['schemes']} epochs: a point for each"
    axes.set_title(words, color=INK, size=10)
    plain(axes, "MB that a rank has sent", "test accuracy (%)")


# -- communication that is rare -------------------------------------------------------------------

OUTER = {"period": 10, "momentum": 0.5}
RARE: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "all-reduce": (AllReduce, partial(SGD, 0.05, momentum=0.9)),
    "all-reduce, top 5 %": (SCHEMES["all-reduce, top 5 %"], partial(SGD, 0.05, momentum=0.9)),
    "DiLoCo": (partial(DiLoCo, **OUTER), partial(SGD, 0.05, momentum=0.9)),
    "NoLoCo": (partial(NoLoCo, **OUTER), partial(SGD, 0.05, momentum=0.9)),
    "Decoupled DiLoCo": (partial(DecoupledDiLoCo, **OUTER), partial(SGD, 0.05, momentum=0.9)),
    "DeMo": (
        partial(AllReduce, sums=demo(keep=16, decay=0.9)),
        partial(Lion, 0.003, beta1=0.0, beta2=0.0),
    ),
}
"""Schemes, and the rules with which they train; DeMo's takes the sign of the sum."""


def rare(figure: Figure) -> None:
    """Loss of a small network over the bytes that schemes of rare communication send."""
    train, test = load_dataset("digits")

    def rank(way: Any, comm: Any) -> list[tuple[float, float]]:
        scheme, rule = way
        model = Model(create_net("cnn", train.classes, train.input_shape), train.input_shape)
        exchange, part, found = scheme(comm), Traffic(), []

        def count(method: Callable[..., Any], *args: Any) -> None:
            with comm.traffic.counted(part):
                method(*args)

        for name in ("bucket_ready", "update"):  # not the averages that are evaluated
            setattr(exchange, name, partial(count, getattr(exchange, name)))

        def note(trainer: Any) -> None:
            found.append((part.bytes / 1e6, trainer.history[-1]["val_loss"]))

        options = {"exchange": exchange, "callbacks": [note], "progress": False}
        trainer = Trainer(model, rule(), **options)
        trainer.fit(train, test, epochs=EPOCHS["rare"], global_batch_size=64)
        return comm.gather_object(found)[-1]  # a learner: rank 0 of Decoupled DiLoCo serves

    axes = figure.add_subplot()
    for (name, way), color in zip(RARE.items(), PALETTE, strict=False):
        sent, loss = zip(*run_threads(4, partial(rank, way))[0], strict=True)
        axes.loglog(sent, loss, "o-", color=color, ms=3, lw=1.4, label=name)
        print(f"{name:20} {sent[-1]:8.3f} MB  loss {loss[-1]:.4f}")
    axes.legend(frameon=False, fontsize=8, labelcolor="linecolor", loc="lower left")
    words = f"CNN on digits, 4 ranks, {EPOCHS['rare']} epochs: a point for each"
    axes.set_title(words, color=INK, size=10)
    plain(axes, "MB that a rank has sent", "test loss")


LOST = 0.15
"""Virtual time at which a rank is lost, in s."""

DISTURBED = {
    "rank 3 computes a quarter as fast": (Straggler(3, 4.0),),
    f"rank 3 computes a quarter as fast, rank 2 is lost at {LOST} s": (
        Straggler(3, 4.0),
        Straggler(2, 1e9, LOST),
    ),
}
WAITING = {
    "all-reduce": AllReduce,
    "DiLoCo": partial(DiLoCo, **OUTER),
    "Decoupled DiLoCo, 2 of 4": partial(DecoupledDiLoCo, quorum=2, **OUTER),
}


def decoupled(figure: Figure) -> None:
    """Loss over virtual time beside a slow and a lost rank."""
    train, test = load_dataset("digits")
    x, y = train.read(np.arange(len(train)))
    repeated = np.tile(np.arange(len(x)), EPOCHS["decoupled"])  # one epoch: ranks do not meet
    data = ArrayDataset(x[repeated], y[repeated])
    platform = Platform.load("cpu-1gbit")

    def new_model() -> Model:
        net = create_net("cnn", train.classes, train.input_shape)
        return Model(net, train.input_shape, backend=create_backend(threads=1, tuning="fixed"))

    def rank(scheme: Callable[..., Any], comm: Any) -> list[tuple[float, Any]]:
        model, found = new_model(), []

        def note(trainer: Any) -> None:
            if comm.rank == 0 and trainer.step % 10 == 2:
                found.append((clock.now(), {n: v.copy() for n, v in model.state().items()}))

        options = {"exchange": scheme(comm), "progress": False}
        callbacks = [FunctionCallback(on_step_end=note)]
        trainer = Trainer(model, SGD(0.05, momentum=0.9), callbacks=callbacks, **options)
        trainer.fit(data, epochs=1, global_batch_size=64, loader_threads=0)
        return found

    pair = figure.subplots(1, 2, sharey=True)
    for axes, (title, stragglers) in zip(pair, DISTURBED.items(), strict=True):
        for (name, scheme), color in zip(WAITING.items(), PALETTE[::3], strict=False):
            run = run_virtual(
                partial(rank, scheme),
                network=platform.network(4),
                costs=AnalyticCosts(platform, "float32", slots=1),
                processor=Processor.of(platform),
                disturbances=Disturbances(stragglers=stragglers),
            )
            model, points = new_model(), []
            judge = Trainer(model, SGD(0.0), progress=False)
            for now, state in run.results[0]:
                model.load(state)
                points.append((now, judge.evaluate(test)["loss"]))
            times, losses = zip(*(p for p in points if p[0] < 1e3), strict=True)
            axes.semilogy(times, losses, "o-", color=color, ms=3, lw=1.4, label=name)
            print(f"{title}: {name:26} {times[-1]:.3f} s  loss {losses[-1]:.4f}")
        if len(stragglers) > 1:
            axes.axvline(LOST, color=INK, lw=1, ls=":")
        axes.set_title(title, color=INK, size=8)
        plain(axes, "virtual time (s)", "test loss of rank 0")
    pair[0].legend(frameon=False, fontsize=8, labelcolor="linecolor")


# -- exactness ------------------------------------------------------------------------------------


def exactness(figure: Figure) -> None:
    """Difference of the parameters from those of one rank, over the steps."""
    train, _ = load_dataset("digits")

    def rank(exact: bool, comm: Any) -> list[np.ndarray]:
        net = create_net("cnn", train.classes, train.input_shape)
        model = Model(net, train.input_shape, backend=create_backend(threads=1, tuning="fixed"))
        sums = {"sums": lambda group: ExactSums(group, shards=4)} if exact else {}
        look = Steps(
            lambda _: np.concatenate([p.master.ravel() for p in model.parameters.values()])
        )
        options = {"exchange": AllReduce(comm, **sums), "callbacks": [look], "progress": False}
        trainer = Trainer(model, SGD(0.05, momentum=0.9), **options)
        trainer.fit(train, epochs=EPOCHS["exactness"], global_batch_size=64)
        return look.found

    axes = figure.add_subplot()
    smallest = 1e-9
    for exact, style in ((False, "-"), (True, "--")):
        one, *others = (run_threads(p, partial(rank, exact))[0] for p in (1, 2, 3, 4))
        for ranks, (other, color) in enumerate(zip(others, PALETTE[::3], strict=False), start=2):
            both = zip(other, one, strict=True)
            away = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in both]
            label = f"{ranks} ranks{', exact: the same bytes' if exact else ''}"
            values = np.maximum(away, smallest * 1.3**ranks if exact else smallest)
            axes.semilogy(
                range(1, len(values) + 1), values, style, color=color, lw=1.4, label=label
            )
            assert not exact or not max(away)
    axes.set_ylim(smallest / 2, 1e-5)
    axes.legend(frameon=False, fontsize=8, labelcolor="linecolor", ncols=2, loc="upper left")
    axes.set_title("Parameters of P ranks beside those of one, CNN on digits", color=INK, size=10)
    plain(axes, "step", "relative difference (none is drawn at the bottom)")


# -- how it works inside --------------------------------------------------------------------------


def packages(figure: Figure) -> None:
    """Packages of the library in levels: each imports those below it only."""
    root = Path(pydtnn.__file__).parent
    arrows: dict[str, set[str]] = {}
    for path in root.rglob("*.py"):
        room = path.relative_to(root).with_suffix("").parts[0]
        found = re.findall(
            r"(?:from|import) pydtnn\.(\w+)|from pydtnn import (\w+)", path.read_text()
        )
        arrows.setdefault(room, set()).update("".join(pair) for pair in found)
    names = {n for n in arrows if (root / n).is_dir() or n == "metrics"}
    arrows = {n: {m for m in arrows[n] if m in names and m != n} for n in names}

    def level(name: str) -> int:
        return 1 + max((level(below) for below in arrows[name]), default=-1)

    rows: dict[int, list[str]] = {}
    for name in sorted(names):
        rows.setdefault(level(name), []).append(name)
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    width, places = 1.9, {}
    for height, row in rows.items():
        for i, name in enumerate(row):
            places[name] = (i - (len(row) - 1) / 2) * 2.3, 1.35 * height
    for name, below in arrows.items():
        indirect = set().union(*(reached(arrows, b) for b in below)) if below else set()
        for target in below - indirect:
            (x, y), (u, v) = places[name], places[target]
            arrow = {
                "arrowstyle": "-|>",
                "color": "#9a9a92",
                "lw": 0.9,
                "shrinkA": 0,
                "shrinkB": 1,
            }  # behind the boxes
            axes.annotate("", (u, v + 0.32), (x, y - 0.32), arrowprops=arrow, zorder=1)
    for name, (x, y) in places.items():
        color = PALETTE[list(sorted(names)).index(name) % len(PALETTE)]
        corner = x - width / 2, y - 0.3
        box = FancyBboxPatch(
            corner, width, 0.6, boxstyle="round,pad=0.02", fc=BAND, ec=color, lw=1.4
        )
        axes.add_patch(box).set_zorder(2)
        axes.text(x, y, name, ha="center", va="center", color=INK, size=11, zorder=3)
    axes.autoscale_view()
    axes.set(xlim=(-5.0, 5.0))
    axes.axis("off")


def reached(arrows: dict[str, set[str]], name: str) -> set[str]:
    """What a package imports, also through others."""
    return set().union(arrows[name], *(reached(arrows, below) for below in arrows[name]))


def step(figure: Figure) -> None:
    """A step of two ranks in virtual time: passes of layers, and messages beside them."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        command = (
            "--model resnet8 --virtual-ranks 2 --platform cpu-1gbit --batch-size 16 --epochs 1"
        )
        options = f"--steps-per-epoch 3 --scheme :bucket_bytes=131072 --trace {trace}"
        options += f" --output-dir {folder}"
        command = [sys.executable, "-m", "pydtnn.train", *command.split(), *options.split()]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        draw_step(figure, load_timeline(trace))


def draw_step(figure: Figure, timeline: Any) -> None:
    begin, end = timeline.steps.start[2].min(), timeline.steps.stop[2].max()
    axes = figure.add_subplot()
    colors = {Kind.FORWARD: PALETTE[0], Kind.BACKWARD: PALETTE[4]}
    a = timeline.activities
    for rank in range(2):
        top = -1.6 * rank
        inside = a[
            (a["rank"] == rank) & (a["lane"] == 0) & (a["start"] >= begin) & (a["stop"] <= end)
        ]
        for kind, color in colors.items():
            for one in inside[inside["kind"] == kind]:
                bar(axes, one, begin, top, color)
        names = {timeline.names[i]: i for i in np.unique(inside["name"])}
        for one in inside[(inside["kind"] == Kind.PHASE) & (inside["name"] == names["exchange"])]:
            bar(axes, one, begin, top, "#c9c9c2")
        for one in inside[(inside["kind"] == Kind.PHASE) & (inside["name"] == names["update"])]:
            bar(axes, one, begin, top, PALETTE[6])
        sent = timeline.messages.sent
        sent = sent[(sent["source"] == rank) & (sent["start"] >= begin) & (sent["stop"] <= end)]
        for one in sent:
            bar(axes, one, begin, top - 0.55, PALETTE[7], 0.3)
        axes.text(-0.1, top + 0.25, f"rank {rank}", ha="right", va="center", color=INK)
        axes.text(-0.1, top - 0.4, "messages", ha="right", va="center", color=QUIET, size=8)
    kinds = {"forward": PALETTE[0], "backward": PALETTE[4], "waits for gradients": "#c9c9c2"}
    kinds |= {"update": PALETTE[6], "messages of a bucket": PALETTE[7]}
    handles = [Rectangle((0, 0), 1, 1, fc=color) for color in kinds.values()]
    axes.legend(handles, kinds, frameon=False, fontsize=8, ncols=5, loc="upper center",
                bbox_to_anchor=(0.5, 1.14))  # fmt: skip
    axes.set_yticks([])
    axes.set_ylim(-2.4, 0.7)
    axes.autoscale_view(scaley=False)
    plain(axes, "virtual time in the step (ms)", "")
    axes.set_xlim(0, (end - begin) / 1e6)


def bar(axes: Axes, one: Any, begin: int, y: float, color: str, height: float = 0.5) -> None:
    start, width = (one["start"] - begin) / 1e6, (one["stop"] - one["start"]) / 1e6
    axes.add_patch(Rectangle((start, y), width, height, fc=color, ec="white", lw=0.3))


def buckets(figure: Figure) -> None:
    """The flat array of gradients of ResNet-8: parameters, and the buckets that are sent."""
    model = Model(create_net("resnet8", 10, (32, 32, 3)), (32, 32, 3), bucket_bytes=1 << 17)
    axes = figure.add_axes((0.02, 0.02, 0.96, 0.96))
    at = 0
    for bucket in model.buckets:
        color = PALETTE[2 * bucket.index]
        nbytes = 4 * len(bucket.values) // 1000
        axes.add_patch(Rectangle((at, 0), len(bucket.values), 1, fc="none", ec=color, lw=2))
        for entry in bucket.parameters:
            start, size = at + entry.slice.start, entry.slice.stop - entry.slice.start
            axes.add_patch(Rectangle((start, 0), size, 1, fc=color, ec="white", lw=0.4, alpha=0.55))
            if size > 3600:
                label = entry.name.removesuffix(".w").replace(".0.", "\n")
                axes.text(start + size / 2, 0.5, label, ha="center", va="center", size=8, color=INK)
        middle = at + len(bucket.values) / 2
        axes.annotate(
            "", (middle, 1.9), (middle, 1.05), arrowprops={"arrowstyle": "-|>", "color": color}
        )
        words = (
            f"bucket {bucket.index}: {nbytes} kB,\none message" if nbytes > 50 else f"{nbytes} kB"
        )
        axes.text(middle, 2.0, words, ha="center", va="bottom", color=color, weight="bold", size=9)
        at += len(bucket.values)
    arrow = {"arrowstyle": "-|>", "color": QUIET}
    axes.annotate("", (at, -0.35), (0, -0.35), arrowprops=arrow)
    words = "order in which backward completes the gradients"
    axes.text(at / 2, -0.55, words, ha="center", va="top", color=QUIET, size=9)
    axes.set(xlim=(-500, at + 3000), ylim=(-1, 3.1))
    axes.axis("off")


# -- speed ----------------------------------------------------------------------------------------

MODELS = {
    "resnet18": "ResNet-18, 224 x 224, batch 8",
    "vgg16_bn": "VGG-16-BN, 32 x 32, batch 64",
    "resnet20": "ResNet-20, 32 x 32, batch 64",
    "resnet44": "ResNet-44, 32 x 32, batch 64",
}


def speed(figure: Figure) -> None:
    """Speed and memory of a training step relative to PyTorch, of the stored results."""
    results = (Path(__file__).parent.parent / "benchmarks/results/step_time.txt").read_text()
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    for row, (model, label) in enumerate(MODELS.items()):
        batch = label.rpartition(" ")[2]
        row_of = rf"^{model} +{batch} +(\d) +full.*?([\d.]+) \(.*?\) +\d+ +\d+ +([\d.]+)"
        found = re.findall(row_of, results, re.M)
        for (threads, ratio, memory), offset in zip(found, (0.2, -0.2), strict=True):
            color = PALETTE[0] if threads == "1" else PALETTE[7]
            for axes, value, digits in ((left, float(ratio), 1), (right, float(memory), 2)):
                axes.barh(row + offset, value, 0.36, color=color, zorder=2)
                words = {"ha": "right", "va": "center", "color": "white", "size": 8}
                axes.text(0.97 * value, row + offset, f"{value:.{digits}f}", **words)
    left.set_yticks(range(len(MODELS)), MODELS.values())
    right.set_yticks([])
    left.set_title("speed, PyTorch = 1", size=10, color=INK)
    right.set_title("memory, PyTorch = 1", size=10, color=INK)
    for axes in (left, right):
        plain(axes, "", "")
        axes.grid(visible=False, axis="y")
        axes.axvline(1, color=INK, lw=1, zorder=3)
    handles = [Rectangle((0, 0), 1, 1, fc=PALETTE[i]) for i in (0, 7)]
    labels = ["1 thread", "2 threads"]
    figure.legend(handles, labels, frameon=False, ncols=2, loc="lower center", fontsize=9)
    figure.subplots_adjust(wspace=0.14, bottom=0.18)


# -- over ranks -----------------------------------------------------------------------------------

TARGET = 0.98


def ranks(figure: Figure) -> None:
    """Time to an accuracy and time of a step over ranks, of the stored results."""
    lines = (Path(__file__).parent.parent / "benchmarks/results/over_ranks.jsonl").read_text()
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for row in map(json.loads, lines.splitlines()):
        found.setdefault(row["way"], {}).setdefault(row["ranks"], []).append(row)
    left, right = figure.subplots(1, 2)
    for (way, rows), color in zip(found.items(), (PALETTE[i] for i in (0, 4, 7, 2)), strict=True):
        (numbers, runs), middle = zip(*sorted(rows.items()), strict=True), {}
        for n, own in zip(numbers, runs, strict=True):
            own = [row for row in own if row["seed"]] or own  # or the search alone
            times = [1e3 * row["seconds"] if row["accuracy"] >= TARGET else np.inf for row in own]
            left.plot([n] * len(times), times, "_", color=color, ms=7)
            middle[n] = np.median(times)
        left.plot(numbers, [*middle.values()], "o-", color=color, ms=3, lw=1.4, label=way)
        for name, style in (("seconds", "o-"), ("waiting", "o:")):
            parts = [1e3 * own[0][name] / own[0]["steps"] for own in runs]
            right.plot(numbers, parts, style, color=color, ms=3, lw=1.4)
    words = (f"ms until {100 * TARGET:g} %", "ms per step; dotted: waiting")
    for axes, title in zip((left, right), words, strict=True):
        axes.set_title(title, color=INK, size=11)
        plain(axes, "virtual ranks", "")
        axes.set_xscale("log", base=2)
        ticks = sorted({n for rows in found.values() for n in rows})
        axes.set_xticks(ticks, ticks)
        axes.set_ylim(bottom=0)
    left.legend(frameon=False, labelcolor="linecolor")


# -- orthogonal steps -----------------------------------------------------------------------------

RATES = (0.001, 0.003, 0.01, 0.03, 0.1)
ADAMW = partial(AdamW, weight_decay=0.1)
LATE = partial(StaleGradients, delay=1)
RULES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "AdamW": (ADAMW, AllReduce),
    "Muon": (Muon, AllReduce),
    "Muon, bfloat16": (partial(Muon, bfloat16=True), AllReduce),
}
DELAYED: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "AdamW": (ADAMW, AllReduce),
    "AdamW, a step late": (ADAMW, LATE),
    "Muon": (Muon, AllReduce),
    "Muon, a step late": (Muon, LATE),
}
"""Rules with the schemes that apply their gradients: `LATE` as the pipeline 2bw, in one process."""


read_text = cache(partial(load_dataset, "text", length=64))


def final_loss(
    rule: Callable[..., Any], scheme: Callable[..., Any], rate: float, seed: int
) -> float:
    """Train a GPT for some steps; return its test loss."""
    (train, test), steps = read_text(), EPOCHS["muon"]
    parts = train.subset(np.arange(0, len(train), 8)), test.subset(np.arange(0, len(test), 40))
    size = min(32, len(parts[0]) // steps)
    net = create_net("gpt_nano", train.classes, train.input_shape)
    model = Model(net, train.input_shape, seed=seed)
    schedule = get_schedule("cosine", rate, steps, steps, warmup_steps=steps // 20)
    trainer = Trainer(model, rule(schedule), exchange=scheme(Serial()), progress=False)
    own = parts[0].subset(np.arange(size * steps))
    try:
        trainer.fit(own, epochs=1, batch_size=size, seed=seed)
        return trainer.evaluate(parts[1])["loss"]
    except NotFiniteError:
        return np.nan


def over_rates(
    rules: dict[str, tuple[Callable[..., Any], Callable[..., Any]]],
    rates: Sequence[float],
    figure: Figure,
) -> None:
    """Test loss of a GPT after equal numbers of steps over the learning rate, for three seeds."""
    steps, seeds, axes = EPOCHS["muon"], EPOCHS["seeds"], figure.add_subplot()
    for (name, way), color in zip(rules.items(), PALETTE, strict=False):
        losses = np.array(
            [[final_loss(*way, rate, seed) for seed in range(seeds)] for rate in rates]
        )
        axes.semilogx(rates, losses.mean(axis=1), "o-", color=color, ms=3, lw=1.4, label=name)
        axes.semilogx(rates, losses, "_", color=color, ms=6)
        words = (
            f"{m:.3f} ({a:.3f} to {b:.3f})"
            for m, a, b in zip(losses.mean(1), losses.min(1), losses.max(1), strict=True)
        )
        print(f"{name:18} {'  '.join(words)}", flush=True)
    axes.legend(frameon=False, fontsize=8, labelcolor="linecolor")
    axes.set_title(
        f"GPT of 100,000 parameters on text, {steps} steps, {seeds} seeds", color=INK, size=10
    )
    plain(axes, "learning rate", "test loss")


PICTURES: dict[str, tuple[Callable[[Figure], None], tuple[float, float]]] = {
    "speed": (speed, (7.6, 2.9)),
    "schemes": (schemes, SIZE),
    "ranks": (ranks, (6.4, 3)),
    "rare": (rare, SIZE),
    "muon": (partial(over_rates, RULES, RATES), SIZE),
    "asynchronous": (partial(over_rates, DELAYED, RATES[:4]), SIZE),
    "decoupled": (decoupled, (9, 3.8)),
    "exactness": (exactness, SIZE),
    "packages": (packages, (8, 7)),
    "step": (step, (7.6, 3.4)),
    "buckets": (buckets, (7.6, 2.2)),
}


def save(figure: Figure, path: Path) -> None:
    """Write a picture, with at most 256 colours: a third of the size."""
    content = BytesIO()
    figure.savefig(content, dpi=160, bbox_inches="tight", pad_inches=0.1)
    Image.open(content).convert("RGB").quantize(256).save(path, optimize=True)


def main() -> None:
    """Draw the picture of the first argument into the file of the second."""
    matplotlib.use("Agg")
    draw, size = PICTURES[sys.argv[1]]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size)
        draw(figure)
        save(figure, Path(sys.argv[2]))


if __name__ == "__main__":
    main()
