"""Random trainings: several inputs and outputs, micro-batches, and ranks that are threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator, Serial, run_threads
from pydtnn.data import ArrayDataset
from pydtnn.layers import (
    Add,
    Block,
    Conv2d,
    Dropout,
    Flatten,
    GroupNorm,
    LayerNorm,
    Linear,
    ReLU,
    Sequential,
    Tanh,
)
from pydtnn.model import Model
from pydtnn.optimizers import SGD, Adam
from pydtnn.parallel.exchange import AllReduce
from pydtnn.schedules import OneCycle
from pydtnn.training.trainer import Trainer
from tests.random_cases import Case, Cases


class Net(Block):
    """As many trunks as inputs, added up, and as many heads as outputs."""

    def __init__(self, plan: dict[str, Any]) -> None:
        super().__init__()
        self.plan = plan

    def wire(self, graph: Any, *inputs: Any) -> Any:
        plan, trunks = self.plan, []
        for i, source in enumerate(inputs):
            parts: list[Any] = [Conv2d(4, 3, padding=1)] if len(source.shape) == 3 else [Linear(4)]
            if plan["norm"]:
                parts.append(GroupNorm(2) if len(source.shape) == 3 else LayerNorm())
            parts += [ReLU() if plan["relu"] else Tanh(), Dropout(plan["dropout"]), Flatten()]
            trunks.append(graph.add(Sequential(*parts, Linear(5), name=f"trunk{i}"), source))
        joined = trunks[0] if len(trunks) == 1 else graph.add(Add(name="join"), *trunks)
        heads = [graph.add(Linear(n, name=f"head{i}"), joined) for i, n in enumerate(plan["heads"])]
        return tuple(heads) if len(heads) > 1 else heads[0]


def draw(case: Case) -> dict[str, Any]:
    """Choose a network, data, a batch, an optimizer and how ranks share them."""
    rng = case.rng
    shapes = [[(4, 4, 2), (3,), (3, 3, 1)][i] for i in rng.permutation(3)[: rng.integers(1, 4)]]
    losses = rng.choice(["cross_entropy", "mse", "hinge"], rng.integers(1, 4)).tolist()
    ranks = int(rng.integers(1, 5))
    batch = int(rng.integers(max(ranks, 2), 12))
    samples = int(rng.integers(batch, 30))
    least = -(-batch // ranks)
    return {
        "shapes": shapes,
        "losses": losses,
        "weights": np.round(rng.uniform(0.1, 3, len(losses)), 2).tolist(),
        "heads": [3 if loss in ("cross_entropy", "hinge") else 2 for loss in losses],
        "norm": bool(rng.integers(2)),
        "relu": bool(rng.integers(2)),
        "dropout": float(rng.choice([0.0, 0.3])),
        "ranks": ranks,
        "accumulation": int(rng.integers(1, min(least, 4) + 1)),
        "batch": batch,
        "samples": samples,
        "adam": bool(rng.integers(2)),
        "clip": [None, 0.1, 1.0][rng.integers(3)],
        "seed": int(rng.integers(1000)),
    }


def data(plan: dict[str, Any], samples: int, seed: int = 0) -> ArrayDataset:
    rng = np.random.default_rng([plan["seed"], seed])
    x = tuple(rng.normal(size=(samples, *shape)) for shape in plan["shapes"])
    y: list[Any] = [
        rng.integers(0, 3, samples)
        if loss in ("cross_entropy", "hinge")
        else rng.normal(size=(samples, 2))
        for loss in plan["losses"]
    ]
    classes = tuple(3 if y.dtype.kind == "i" else None for y in y)
    single = classes[0] if len(y) == 1 else classes
    return ArrayDataset(x, tuple(y) if len(y) > 1 else y[0], classes=single)


def make(plan: dict[str, Any], exchange: AllReduce, **options: Any) -> Trainer:
    shapes = plan["shapes"] if len(plan["shapes"]) > 1 else plan["shapes"][0]
    model = Model(Net(plan), tuple(shapes), backend="numpy", dtype="float64", bucket_bytes=256)
    schedule = OneCycle(0.02, 3 * -(-plan["samples"] // plan["batch"]))
    rule = Adam if plan["adam"] else SGD
    metrics = [["mse"] if n == 2 else ["accuracy"] for n in plan["heads"]]
    return Trainer(
        model,
        rule(schedule, weight_decay=0.01, clip_norm=plan["clip"]),
        loss=plan["losses"],
        loss_weights=plan["weights"],
        metrics=metrics,
        exchange=exchange,
        **options,
    )


def fit(trainer: Trainer, plan: dict[str, Any]) -> Trainer:
    trainer.fit(
        data(plan, plan["samples"]),
        data(plan, 5, seed=1),
        epochs=3,
        global_batch_size=plan["batch"],
        seed=plan["seed"],
    )
    return trainer


def values(trainer: Trainer) -> tuple[np.ndarray, np.ndarray]:
    history = np.array([[*logs.values()] for logs in trainer.history])
    return np.concatenate([v.reshape(-1) for v in trainer.model.state().values()]), history


def assert_close(first: Any, second: Any, plan: dict[str, Any]) -> None:
    """Sums in another order differ by a few roundings, which Adam divides by small roots."""
    for a, b in zip(first, second, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8, err_msg=str(plan))


@pytest.mark.fuzz("distributed")
def test_ranks_and_micro_batches_train_like_one_rank(cases: Cases) -> None:
    for case in cases:
        plan = draw(case)

        def rank(comm: Communicator, plan: Any = plan) -> Any:
            own = make(plan, AllReduce(comm), accumulation=plan["accumulation"])
            return values(fit(own, plan))

        expected = values(fit(make(plan, AllReduce(Serial())), plan))
        results = run_threads(plan["ranks"], rank)
        for result in results:
            case.compare(assert_close, result, expected, plan)
            case.compare(np.testing.assert_array_equal, result[0], results[0][0], str(plan))
