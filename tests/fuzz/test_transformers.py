"""Random transformers, meshes, schemes, pipelines and options train as one rank does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import numpy as np
import pytest

from models.gpt import gpt
from models.llama import llama
from models.vit import vit
from pydtnn import Trainer
from pydtnn.comm import Communicator, run_threads
from pydtnn.comm.serial import Serial
from pydtnn.data import ArrayDataset
from pydtnn.model import Model
from pydtnn.optimizers import SGD, AdamW, Optimizer
from pydtnn.parallel.mesh import Mesh
from pydtnn.parallel.pipeline import PIPELINE_SCHEDULES
from pydtnn.parallel.schemes import create_scheme
from pydtnn.utils.errors import RankError
from tests.random_cases import Case, Cases

STEPS, BATCH, PIXELS = 3, 24, (8, 8, 3)
AXES = ("data", "tensor", "filter", "channel", "context", "expert", "pipeline")
NETS = ("gpt", "gpt, not tied", "vit", "llama", "llama, not tied", "moe gpt", "moe llama, not tied")
SCHEMES = ("allreduce", "sharded", "sharded_gradients", "sharded_parameters")
REFUSED = (
    *("some of which share parameters", "stages for a network of"),
    *("cut along", "positions must be at least"),
    *("experts must be at least", "divides the experts of a network, and this one has none"),
)
"""Tied weights in one stage, few layers; an axis of an array cut twice; few positions, experts."""


class Drawn:
    """A network, a mesh, and options of a training."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.heads, self.depth = int(rng.integers(1, 5)), int(rng.integers(1, 4))
        self.width = self.heads * int(rng.integers(2, 4)) * 2  # not 2: rounding
        self.classes, self.length = int(rng.integers(5, 14)), int(rng.integers(3, 9))
        self.dropout = float(rng.choice([0.0, 0.2]))
        self.net = str(rng.choice(NETS))
        self.groups = int(rng.choice([n for n in range(1, self.heads + 1) if self.heads % n == 0]))
        self.experts = int(rng.integers(1, 7)) if "moe" in self.net else 0
        self.choices = int(rng.integers(1, min(self.experts, 3) + 1)) if self.experts else 1
        self.capacity = float(rng.choice([0.6, 1.0])) if rng.random() < 0.5 else None
        self.axes = self._axes(rng)
        self.clip = 0.5 if rng.random() < 0.4 else None
        self.recompute = 3 if rng.random() < 0.3 else None
        self.optimizer = str(rng.choice(["sgd", "adamw"]))
        self.scheme = str(rng.choice(SCHEMES))
        self.options: dict[str, Any] = {}
        if "pipeline" in self.axes:
            self.options["micro_batches"] = int(rng.integers(2, 5))
            halves = {"chimera", "dualpipe"} if self.axes["pipeline"] % 2 else set()
            schedules = [name for name in PIPELINE_SCHEDULES if name not in halves]
            self.options["pipeline_schedule"] = str(rng.choice(schedules))
        else:
            self.options["accumulation"] = int(rng.integers(1, 4))

    def __repr__(self) -> str:
        return str(vars(self))

    @staticmethod
    def _axes(rng: np.random.Generator) -> dict[str, int]:
        ranks, axes = int(rng.choice([2, 3, 4, 6, 8])), {}
        for axis in rng.permutation(AXES)[: rng.integers(1, 4)].tolist():
            axes[axis] = int(rng.choice([n for n in range(1, ranks + 1) if ranks % n == 0]))
            ranks //= axes[axis]
        return {axis: n for axis, n in axes.items() if n > 1} or {"data": 2}

    def model(self, **options: Any) -> Model:
        if self.net == "vit":
            net = vit(
                *(self.width, self.depth, self.heads, self.classes, PIXELS),
                dropout=self.dropout,
                attention_dropout=self.dropout,
            )
            return Model(net, PIXELS, dtype="float64", seed=2, **options)
        shape = (self.length,)
        name, _, untied = self.net.partition(", ")
        is_gpt = name.endswith("gpt")
        own: Any = {"dropout": self.dropout} if is_gpt else {"groups": self.groups}
        net = (gpt if is_gpt else llama)(
            *(self.classes, shape),
            depth=self.depth,
            heads=self.heads,
            width=self.width,
            tied=not untied,
            experts=self.experts,
            choices=self.choices,
            capacity=self.capacity,
            balance=0.3,
            z=0.2,
            **own,
        )
        return Model(net, shape, dtype="float64", seed=2, **options)

    def data(self) -> ArrayDataset:
        rng, samples = np.random.default_rng(1), STEPS * BATCH
        if self.net == "vit":
            x = rng.normal(size=(samples, *PIXELS))
            return ArrayDataset(x, rng.integers(self.classes, size=samples))
        x = rng.integers(self.classes, size=(2, samples, self.length))
        return ArrayDataset(x[0].astype("float32"), x[1])

    def rule(self) -> Optimizer:
        if self.optimizer == "sgd":
            return SGD(0.1, momentum=0.9, clip_norm=self.clip)
        return AdamW(0.01, epsilon=1e-3, clip_norm=self.clip)


def train(model: Model, drawn: Drawn, **options: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """Train some steps; return losses and parameters."""
    trainer = Trainer(model, drawn.rule(), progress=False, **options)
    data = options["mesh"].shape["data"]
    trainer.fit(drawn.data(), epochs=1, batch_size=BATCH // data)
    return np.array(trainer.losses), model.state()


def on_ranks(drawn: Drawn, comm: Communicator) -> tuple[Any, dict[str, np.ndarray]]:
    mesh = Mesh(comm, **drawn.axes)
    schedule = {k: v for k, v in drawn.options.items() if k == "pipeline_schedule"}
    return train(
        drawn.model(mesh=mesh, recompute=drawn.recompute, **schedule),
        drawn,
        mesh=mesh,
        exchange=create_scheme(drawn.scheme, mesh.data),
        **drawn.options,
    )


@pytest.mark.filterwarnings("ignore:Trainer")  # of pipelines with few micro-batches
@pytest.mark.fuzz("plans")
def test_a_transformer_trains_as_on_one_rank(cases: Cases) -> None:
    for case in cases:
        drawn = Drawn(case.rng)
        check(case, drawn, partial(run_threads, prod(drawn.axes.values())))


def check(case: Case, drawn: Drawn, run: Callable[..., Any]) -> None:
    serial = Mesh(Serial())
    losses, state = train(drawn.model(), drawn, mesh=serial)
    try:
        found = run(partial(on_ranks, drawn))
    except RankError as error:
        if any(reason in str(error) for reason in REFUSED):
            return
        raise
    for own_losses, own_state in found:
        same = partial(np.testing.assert_allclose, rtol=0, atol=1e-11)
        case.compare(same, own_losses, losses, err_msg=f"losses of {drawn}")
        for name, array in state.items():
            case.compare(same, own_state[name], array, err_msg=f"{name} of {drawn}")
