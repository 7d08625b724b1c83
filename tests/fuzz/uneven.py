"""A short training whose last step leaves ranks few samples or none, on any mesh and schedule.

``python -m tests.fuzz.uneven SEED...`` runs cases in one MPI world, each on its first ranks, and
compares them with serial training; the first one that fails ends the world.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from functools import partial
from math import prod
from typing import Any

import numpy as np

from models.gpt import gpt
from models.llama import llama
from models.vit import vit
from pydtnn import Mesh, Model, Trainer
from pydtnn.comm import Communicator, Serial, create_communicator
from pydtnn.data import ArrayDataset
from pydtnn.layers import (
    Add,
    BatchNorm,
    Block,
    Conv2d,
    Dropout,
    Flatten,
    GlobalAvgPool2d,
    GroupNorm,
    LayerNorm,
    Linear,
    Net,
    ReLU,
    Sequential,
    Tanh,
)
from pydtnn.model.pipeline import PIPELINE_SCHEDULES
from pydtnn.optimizers import SGD, AdamW
from pydtnn.parallel.reproducible import ExactSums
from pydtnn.parallel.schemes import create_scheme
from pydtnn.training import capabilities
from tests.checked import Checked

CLASSES, TOKENS, LENGTH, PIXELS, FEATURES = 4, 7, 5, (8, 8, 3), 6
IMAGES = ("spatial", "width", "filter", "channel", "alternate")
SEQUENCES = ("context", "tensor", "filter")
SHAPES = ((4, 4, 2), (3,), (3, 3, 1))
HEADS = {"cross_entropy": 3, "hinge": 3, "mse": 2}
"""Of a network of several inputs and outputs: shapes, and outputs for each loss."""

SCHEMES = ("allreduce", "sharded", "sharded_gradients", "sharded_parameters")

REFUSED = (
    "expected an even number of ranks, whose halves mirror each other",
    *(
        max(re.split(r"{\d}", why), key=len)
        for feature in capabilities.FEATURES.values()
        for why in feature.excludes.values()
    ),
    *("cut along", "stages for a network of", "positions must be at least"),
    *("experts must be at least", "divides the experts of a network, and this one has none"),
)
"""Sentences about features that exclude each other, plans and schedules that do not fit, few
layers, positions or experts; there are none about numbers of samples."""

Result = dict[str, np.ndarray]


def conv_net(depth: int, norm: bool) -> Net:
    layers: list[Net] = []
    for _ in range(depth):
        layers += [Conv2d(4, 3, padding="same"), *([BatchNorm()] if norm else []), ReLU()]
    return Sequential(*layers, GlobalAvgPool2d(), Dropout(0.2), Linear(6), ReLU(), Linear(CLASSES))


def dense_net(depth: int) -> Net:
    layers = [layer for _ in range(depth) for layer in (Linear(8), LayerNorm(), ReLU())]
    return Sequential(Flatten(), *layers, Dropout(0.2), Linear(CLASSES))


class Several(Block):
    """As many trunks as inputs, added up, and as many heads as losses."""

    def __init__(self, losses: list[str], norm: bool, relu: bool) -> None:
        super().__init__()
        self.losses, self.norm, self.relu = losses, norm, relu

    def wire(self, graph: Any, *inputs: Any) -> Any:
        trunks = []
        for i, source in enumerate(inputs):
            image = len(source.shape) == 3
            parts: list[Net] = [Conv2d(4, 3, padding=1) if image else Linear(4)]
            parts += [GroupNorm(2) if image else LayerNorm()] * self.norm
            parts += [ReLU() if self.relu else Tanh(), Dropout(0.3), Flatten(), Linear(5)]
            trunks.append(graph.add(Sequential(*parts, name=f"trunk{i}"), source))
        joined = trunks[0] if len(trunks) == 1 else graph.add(Add(name="join"), *trunks)
        heads = [graph.add(Linear(HEADS[name]), joined) for name in self.losses]
        return tuple(heads) if len(heads) > 1 else heads[0]


class Uneven:
    """What is trained on which ranks, drawn from a seed.

    Attributes
    ----------
    axes : dict of str to int
    parts : int
        Micro-batches of a rank, or accumulated shards.
    last : int
        Samples of the last step, of all ranks: from 1 to those of two micro-batches each.
    **own
        Attributes that are not drawn: the kind of network, axes, parts, the schedule, some blocks.
    """

    def __init__(self, seed: int, most: int = 6, **own: Any) -> None:
        rng = self.rng = np.random.default_rng([seed, 2611])
        self.seed = seed
        self.kind = own.get("kind") or str(
            rng.choice(["dense", "conv", "gpt", "llama", "vit", "moe", "several"])
        )
        self.axes = own.get("axes") or self._axes(most)
        ranks = self.axes.get("data", 1) * self.axes.get("shard", 1)
        parts = int(rng.integers(1, 5 if "pipeline" in self.axes or self.kind == "several" else 3))
        self.parts = own.get("parts", parts)
        self.batch = 2 * self.parts * ranks
        self.last = own.get("last") or int(rng.integers(1, self.batch + 1))
        self.validated = int(rng.integers(1, ranks + 2))
        self.schedule = own.get("schedule") or str(rng.choice([*PIPELINE_SCHEDULES]))
        self.exact = "shard" not in self.axes and rng.random() < 0.1
        schemes = SCHEMES[:2] if self.exact else SCHEMES[-1:] if "shard" in self.axes else SCHEMES
        self.scheme = str(rng.choice(schemes))
        self.adam, self.clip = rng.random() < 0.5, 0.5 if rng.random() < 0.3 else None
        self.norm = "pipeline" not in self.axes and self.last > 1
        self.recompute = 3 if rng.random() < 0.3 else None
        self.blocks = self._blocks() | own.get("blocks", {})
        self.shapes = [SHAPES[i] for i in rng.permutation(3)[: rng.integers(1, 4)]]
        losses = rng.choice([*HEADS], rng.integers(1, 4)).tolist()
        self.judged: dict[str, Any] = {}
        if self.kind == "several":
            self.judged = {
                "loss": losses,
                "loss_weights": rng.uniform(0.1, 3, len(losses)).tolist(),
                "metrics": [["mse"] if name == "mse" else ["accuracy"] for name in losses],
            }

    def _blocks(self) -> dict[str, Any]:
        """Options of transformers; weights are not shared by stages of a pipeline."""
        rng, heads = self.rng, int(self.rng.integers(1, 5))
        options: dict[str, Any] = {"depth": int(rng.integers(1, 4)), "heads": heads}
        options["width"] = heads * int(rng.integers(2, 4)) * 2  # not 2: rounding
        options["tied"] = "pipeline" not in self.axes and bool(rng.random() < 0.5)
        if self.kind == "llama":
            options["groups"] = int(rng.choice([n for n in (1, 2, 3, 4) if heads % n == 0]))
        else:
            options["dropout"] = 0.1
        if self.kind == "moe" or (self.kind == "llama" and rng.random() < 0.4):
            options |= {"experts": int(rng.integers(2, 7)), "choices": 2, "balance": 0.3, "z": 0.2}
            options["capacity"] = float(rng.choice([0.6, 1.0])) if rng.random() < 0.5 else None
        return options

    def __repr__(self) -> str:
        return f"Uneven({ {k: v for k, v in vars(self).items() if k != 'rng'} })"

    def _axes(self, most: int) -> dict[str, int]:
        of_network = {"conv": IMAGES, "dense": ("filter", "channel")}.get(self.kind, SEQUENCES)
        names = ["data", "shard", "pipeline", *of_network, *["expert"] * (self.kind == "moe")]
        if self.kind == "several":
            names = ["data", "shard"]
        # the axis of samples and the pipeline more often than others
        drawn = self.rng.permutation([*names, "data", "data", *names[2:3]])[
            : self.rng.integers(1, 5)
        ]
        axes: dict[str, int] = {}
        for name in dict.fromkeys(drawn.tolist()):
            room = most // prod(axes.values())
            if room > 1:
                axes[name] = int(self.rng.integers(2, min(room, 4) + 1))
        return axes

    @property
    def ranks(self) -> int:
        return prod(self.axes.values())

    def model(self, **options: Any) -> Model:
        shape: Any = (LENGTH,)
        if self.kind == "dense":
            shape, net = (FEATURES,), dense_net(3)
        elif self.kind == "conv":
            shape, net = PIXELS, conv_net(3, self.norm)
        elif self.kind == "several":
            net = Several(self.judged["loss"], self.blocks["tied"], self.blocks["heads"] > 2)
            shape = tuple(self.shapes) if len(self.shapes) > 1 else self.shapes[0]
        elif self.kind == "vit":
            sizes = (self.blocks[name] for name in ("width", "depth", "heads"))
            shape, net = PIXELS, vit(*sizes, CLASSES, PIXELS, dropout=0.1, attention_dropout=0.1)
        else:
            net = (llama if self.kind == "llama" else gpt)(TOKENS, shape, **self.blocks)
        return Model(net, shape, dtype="float64", seed=2, **options)

    def data(self, samples: int, seed: int) -> ArrayDataset:
        rng = np.random.default_rng([self.seed, seed])
        if self.kind in ("gpt", "llama", "moe"):
            x = rng.integers(TOKENS, size=(2, samples, LENGTH))
            return ArrayDataset(x[0].astype("float64"), x[1], classes=TOKENS)
        if self.kind == "several":
            xs = tuple(rng.normal(size=(samples, *shape)) for shape in self.shapes)
            heads = [HEADS[name] for name in self.judged["loss"]]
            ys = [
                rng.normal(size=(samples, n)) if n == 2 else rng.integers(n, size=samples)
                for n in heads
            ]
            classes = [None if n == 2 else n for n in heads]
            if len(heads) == 1:
                return ArrayDataset(xs, ys[0], classes=classes[0])
            return ArrayDataset(xs, tuple(ys), classes=tuple(classes))
        shape = (FEATURES,) if self.kind == "dense" else PIXELS
        labels = rng.integers(CLASSES, size=samples)
        return ArrayDataset(rng.normal(size=(samples, *shape)), labels, classes=CLASSES)

    def train(self, comm: Communicator, serial: bool = False) -> Result:
        """Train two steps and evaluate; return losses, metrics, parameters and predictions."""
        mesh = Mesh(Serial() if serial else Checked(comm), **({} if serial else self.axes))
        own = {} if serial else {"pipeline_schedule": self.schedule, "recompute": self.recompute}
        model = self.model(mesh=mesh, **own)
        scheme, options = "allreduce" if serial else self.scheme, {}
        momentum = {"epsilon": 1e-3} if self.adam else {"momentum": 0.9}
        if self.exact:
            options["sums"] = partial(ExactSums, shards=self.batch)
        if "shard" in mesh.shape or (mesh.copies is not None and not serial):
            options["copies"] = mesh.copies
        parts = "micro_batches" if model.pipeline is not None else "accumulation"
        trainer = Trainer(
            model,
            (AdamW if self.adam else SGD)(0.01, clip_norm=self.clip, **momentum),
            exchange=create_scheme(scheme, mesh.data, **options),
            mesh=mesh,
            **self.judged,
            sync_batch_norm=self.norm,
            progress=False,
            **({} if serial or self.exact else {parts: self.parts}),
        )
        train, other = self.data(self.batch + self.last, 0), self.data(self.validated, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of few micro-batches
            history = trainer.fit(train, other, epochs=1, global_batch_size=self.batch, seed=3)
        return {
            "losses": np.array(trainer.losses),
            **{f"history {k}": np.array(v) for k, v in history[0].items() if is_value(k)},
            **{f"state {k}": v for k, v in model.state().items()},
            **{f"predictions {i}": y for i, y in enumerate(self.predictions(model, other))},
        }

    def predictions(self, model: Model, data: ArrayDataset) -> tuple[np.ndarray, ...]:
        found = model.predict(data.x)
        return found if isinstance(found, tuple) else (found,)


def is_value(name: str) -> bool:
    """Whether an entry of the history is not a time."""
    return any(own in name for own in ("loss", "accuracy", "mse"))


def assert_equal(found: Result, expected: Result, what: str) -> None:
    """Sums over ranks have another order: 1e-16 of each, of which a few steps make more."""
    assert found.keys() == expected.keys(), what
    for name, value in expected.items():
        np.testing.assert_allclose(
            found[name], value, rtol=1e-9, atol=1e-10, err_msg=f"{name} of {what}"
        )


def is_refused(error: BaseException) -> bool:
    """Whether the case is not possible, by the sentence about it."""
    return any(reason in str(error) for reason in REFUSED)


def main(seeds: list[str], comm: Communicator) -> None:
    done = refused = 0
    for seed in map(int, seeds):
        case = Uneven(seed, comm.size)
        group = comm.split(int(comm.rank < case.ranks))
        if comm.rank < case.ranks:
            try:
                found = case.train(group)
            except ValueError as error:
                if not is_refused(error):
                    raise
                refused += 1
            else:
                done += 1
                if comm.rank == 0:
                    assert_equal(found, case.train(Serial(), serial=True), repr(case))
    if comm.rank == 0:
        print(f"{done} equal, {refused} refused", flush=True)


if __name__ == "__main__":
    os.environ["PYDTNN_TUNING"] = "fixed"
    main(sys.argv[1:], create_communicator())
