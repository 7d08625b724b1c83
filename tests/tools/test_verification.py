"""Silent errors of hardware: flipped bits are found, their ranks named, and nothing else is."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import numpy as np
import pytest

from pydtnn import ArrayDataset, Model, Trainer
from pydtnn.cli.config import TrainConfig
from pydtnn.cli.run import run
from pydtnn.comm import run_threads
from pydtnn.comm.communicator import communicator_of_thread
from pydtnn.comm.thread import Killed
from pydtnn.kernels import create_backend
from pydtnn.layers import BatchNorm, Conv2d, Dropout, Flatten, Linear, ReLU, Sequential
from pydtnn.optimizers import SGD
from pydtnn.parallel.exchange import AllReduce
from pydtnn.parallel.mesh import Mesh
from pydtnn.parallel.reproducible import ExactSums
from pydtnn.parallel.schemes import SCHEMES
from pydtnn.tools import verification
from pydtnn.tools.testing.flips import Flip, Flips
from pydtnn.tools.verification import SilentError, Verification
from pydtnn.utils.errors import AgreedError
from tests.each import each
from tests.tools.survival.test_recovery import OPTIONS

RNG = np.random.default_rng(0)
DATA = ArrayDataset(RNG.normal(size=(45, 8, 8, 2)).astype("f4"), RNG.integers(0, 3, 45))


def train(comm, *callbacks, scheme=AllReduce, axes=None, **options) -> list[Any]:
    """Weights and losses after two epochs of four steps, the last of a part of a batch."""
    net = Sequential(Conv2d(4, 3), BatchNorm(), ReLU(), Dropout(0.2), Flatten(), Linear(3))
    backend, mesh = create_backend("cpu", tuning="fixed", threads=1), axes and Mesh(comm, **axes)
    options |= {"callbacks": callbacks, "exchange": scheme(mesh.data if mesh else comm)}
    model = Model(net, (8, 8, 2), seed=0, backend=backend, mesh=mesh)
    trainer = Trainer(model, SGD(0.1, momentum=0.9), mesh=mesh, progress=False, **options)
    trainer.fit(DATA, epochs=2, global_batch_size=12, seed=3)
    return [*(w.tobytes() for w in trainer.model.state().values()), trainer.losses]


@each(
    ("ranks", "options"),
    [
        (2, {}),
        (3, {"accumulation": 2}),
        (4, {"scheme": SCHEMES["sharded"]}),
        (2, {"scheme": SCHEMES["sharded_parameters"]}),
        (3, {"scheme": partial(AllReduce, sums=partial(ExactSums, shards=6))}),
    ],
)
def test_verified_training_ends_with_the_bytes_of_plain_training(ranks, options):
    def verified(comm):
        check = Verification(every=1)
        return train(comm, check, **options), check.steps, check.found

    expected = run_threads(ranks, partial(train, **options))
    assert run_threads(ranks, verified) == [(one, 8, []) for one in expected]


@each(
    ("ranks", "kind", "call"),
    [(2, "product", 0), (3, "product", 5), (4, "output", 2), (2, "message", 0), (3, "message", 0)],
)
def test_a_bit_that_flips_once_is_found_and_its_step_repeated(ranks, kind, call):
    def disturbed(comm):
        check, flips = Verification(every=1), Flips([Flip(kind, 1, 3, call, element=4, bit=29)])
        return train(comm, check, flips), check.found, len(flips.applied)

    expected, error = run_threads(ranks, train)[0], SilentError(3, "once", (1,))
    results = run_threads(ranks, disturbed)
    assert results == [(expected, [error], rank == 1) for rank in range(ranks)]


@each(
    ("ranks", "words"),
    [
        (2, "ranks 0, 1 computed different gradients, also in .* a third rank"),
        (3, "rank 2 computed wrong gradients in this step, and again"),
    ],
)
def test_a_rank_that_is_wrong_twice_is_named_and_ends_training(ranks, words):
    flip = Flip("parameter", min(2, ranks - 1), 4, 0, element=4, bit=29)
    with pytest.raises(AgreedError, match=f"^Verification: step 6: {words}"):
        run_threads(ranks, lambda comm: train(comm, Verification(every=3), Flips([flip])))


def test_a_rank_that_is_wrong_twice_is_left_out_with_survive(tmp_path, monkeypatch):
    def leave():
        raise Killed

    monkeypatch.setattr(verification, "leave", leave)
    options = OPTIONS | {"verify_steps": 2, "output_dir": str(tmp_path)}
    flips = [Flip("parameter", 1, 1, 0, element=4, bit=29)]
    run_threads(3, lambda comm: run(TrainConfig(**options), comm, [Flips(flips)]))
    [failure] = json.loads((tmp_path / "run.json").read_text())["failures"]
    assert (failure["ranks"], failure["remaining"], failure["step"]) == ([1], 2, 1)


@each(
    ("ranks", "options", "words"),
    [
        (1, {}, "no other rank can compute its gradients; use at least 2 ranks"),
        (2, {"sync_batch_norm": True}, "depend on samples of other ranks; omit"),
        (2, {"axes": {"filter": 2}}, "others do not have the parts along filter; use the axis"),
        (
            2,
            {"scheme": SCHEMES["local_sgd"]},
            "LocalSGD does not sum gradients, which are",
        ),
    ],
)
def test_runs_that_cannot_be_verified_are_refused(ranks, options, words):
    with pytest.raises(AgreedError, match=f"^Verification: .*{words}"):
        run_threads(ranks, lambda comm: train(comm, Verification(), **options))


def test_ranks_with_other_kernels_are_refused(monkeypatch):
    monkeypatch.setattr(verification, "cpu_model", lambda: f"CPU {communicator_of_thread().rank}")
    with pytest.raises(AgreedError, match="the same CPU, got 'CPU 0' on rank 0 .* rounding"):
        run_threads(2, lambda comm: train(comm, Verification()))
