"""Trainers on a mesh: equal to serial training, and what they refuse."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pytest

import pydtnn
from pydtnn import ArrayDataset, Mesh, Model, Trainer
from pydtnn.callbacks import EMA, BestWeights, Checkpointer, EarlyStopping
from pydtnn.comm import Communicator, Serial, run_threads
from pydtnn.data import TokenDataset
from pydtnn.layers import BatchNorm, Conv2d, GlobalAvgPool2d, Linear, ReLU, Sequential
from pydtnn.models import create_net
from pydtnn.optimizers import SGD, Muon, get_optimizer
from pydtnn.parallel.reproducible import ExactSums
from pydtnn.parallel.schemes import AllReduce, ShardedGradients, ShardedOptimizer, ShardedParameters
from pydtnn.saving.weights import load_weights, save_weights
from pydtnn.training.checkpoint import load_checkpoint, save_checkpoint
from pydtnn.training.preparation import start_equal
from pydtnn.utils.errors import AgreedError
from tests.each import each
from tests.small_mesh import (
    SHAPE,
    Axes,
    assert_equal_states,
    mesh_fit,
    mesh_trainer,
    on_ranks,
    small_data,
)
from tests.small_training import checksums

CUT = {"data": 2, "filter": 2}


@each(
    ("axes", "scheme", "rule"),
    [
        (CUT, AllReduce, "adamw"),
        ({"data": 1, "channel": 3}, AllReduce, "lars"),
        ({"spatial": 2, "filter": 2}, AllReduce, "muon"),
        (CUT, ShardedOptimizer, "lamb"),
        (CUT, ShardedGradients, "muon"),
        ({"data": 3, "filter": 2}, ShardedParameters, "muon"),
        ({"data": 1, "shard": 2, "filter": 2}, partial(ShardedParameters, copies=1), "muon"),
        ({"data": 2, "pipeline": 2}, ShardedParameters, "adamw"),
        ({"pipeline": 2, "filter": 2}, AllReduce, "muon"),
    ],
    few=5,
)
def test_training_equals_serial_training(axes, scheme, rule):
    """Also the norm of the gradient, of which each rank has a part, and rules of whole ones."""
    norm = "pipeline" not in axes

    def rank(comm: Communicator, axes: Axes | None, scheme: Any) -> Any:
        optimizer = get_optimizer(rule, lr=0.02, clip_norm=0.5)
        trainer = mesh_trainer(comm, axes, optimizer=optimizer, scheme=scheme, norm=norm)
        history = mesh_fit(trainer)
        return trainer.model.state(), history[-1], optimizer.gradient_norm, trainer.losses

    expected = rank(Serial(), None, AllReduce)
    results = on_ranks(axes, partial(rank, axes=axes, scheme=scheme))
    assert_equal_states([result[0] for result in results], expected[0])
    for result in results:
        assert result[1] == pytest.approx(expected[1], rel=1e-12)
        assert result[2:] == results[0][2:] or not norm  # the same bytes on all ranks
        assert result[2] == pytest.approx(expected[2], rel=1e-12)


@each(
    ("axes", "scheme"),
    [
        ({"tensor": 3}, AllReduce),
        ({"data": 2, "tensor": 2}, ShardedParameters),
        ({"context": 2, "tensor": 2}, AllReduce),
    ],
)
def test_matrices_of_attention_that_ranks_have_parts_of_are_updated_whole(axes, scheme):
    tokens = TokenDataset(np.random.default_rng(0).integers(0, 20, 129), 16, classes=20)

    def rank(comm: Communicator, axes: Axes, scheme: Any) -> Any:
        mesh = Mesh(comm, **axes)
        model = Model(create_net("gpt_nano", 20, (16,)), (16,), dtype="float64", mesh=mesh)
        trainer = Trainer(model, Muon(0.02), exchange=scheme(mesh.data), mesh=mesh, progress=False)
        trainer.fit(tokens, epochs=1, global_batch_size=4)
        return model.state()

    expected = rank(Serial(), {}, AllReduce)
    assert_equal_states(on_ranks(axes, partial(rank, axes=axes, scheme=scheme)), expected)


def test_owners_receive_values_and_gradients_and_return_values():
    """3 n (P - 1) / P elements along an axis of P ranks, of parameters with n = 150 in all."""

    def rank(comm: Communicator) -> int:
        net = Sequential(Linear(12), Linear(6, name="head"))
        model = Model(net, (5,), dtype="float64", mesh=Mesh(comm, filter=comm.size))
        trainer = Trainer(model, Muon(0.02), progress=False)
        before = comm.traffic.bytes
        trainer.optimizer.step()
        return comm.traffic.bytes - before

    for ranks in (1, 2, 3):
        assert sum(run_threads(ranks, rank)) == 8 * 3 * 150 * (ranks - 1) // ranks


@each("axes", [None, {"channel": 2}, {"data": 1, "filter": 3}])
def test_the_state_of_owners_is_continued_on_other_ranks(axes, tmp_path):
    def save(comm: Communicator) -> None:
        trainer = mesh_trainer(comm, CUT, optimizer=Muon(0.02), scheme=ShardedOptimizer)
        mesh_fit(trainer)
        trainer.model.freeze("head")  # other owners of the rest
        trainer.rebind()
        save_checkpoint(tmp_path, trainer)

    def resume(comm: Communicator) -> dict[str, Any]:
        trainer = mesh_trainer(comm, axes, optimizer=Muon(0.02))
        load_checkpoint(tmp_path, trainer)
        mesh_fit(trainer, 2)
        return trainer.model.state()

    on_ranks(CUT, save)
    serial = mesh_trainer(Serial(), None, optimizer=Muon(0.02))
    mesh_fit(serial)
    serial.model.freeze("head")
    mesh_fit(serial, 2)
    assert_equal_states(on_ranks(axes, resume), serial.model.state())


@pytest.mark.mpi(4)
def test_training_equals_serial_training_between_processes(comm):
    serial = mesh_trainer(Serial(), None)
    mesh_fit(serial)
    for axes in (CUT, {"data": 2, "spatial": 2}):
        trainer = mesh_trainer(comm, axes)
        mesh_fit(trainer)
        assert_equal_states([trainer.model.state()], serial.model.state())


@pytest.mark.threads(4)
def test_evaluations_and_predictions_are_those_of_the_serial_model(comm):
    _, validation = small_data()
    serial, trainer = mesh_trainer(Serial(), None), mesh_trainer(comm, CUT)
    expected = serial.evaluate(validation, global_batch_size=3)
    assert trainer.evaluate(validation, global_batch_size=3) == pytest.approx(expected, rel=1e-12)
    y = trainer.model.predict(validation.x, batch_size=3)
    np.testing.assert_allclose(y, serial.model.predict(validation.x), rtol=1e-12, atol=1e-13)


@pytest.mark.threads(4)
def test_saved_models_weights_and_averages_are_whole(comm, shared_path):
    best, final = shared_path / "best.safetensors", shared_path / "final.pydtnn"
    trainer = mesh_trainer(comm, CUT, EMA(0.5), BestWeights(best))
    mesh_fit(trainer, 2)
    trainer.save(final)
    comm.barrier()
    serial = mesh_trainer(Serial(), None, EMA(0.5))
    mesh_fit(serial, 2)
    loaded = pydtnn.load(final, backend="numpy").state()
    assert_equal_states([loaded], serial.model.state())
    load_weights(serial.model, best)
    with pytest.raises(ValueError, match="do not fit the model"):
        load_weights(Model(Linear(3), (4,), backend="numpy"), best)
    load_weights(trainer.model, best)
    assert_equal_states([trainer.model.state()], serial.model.state())


@pytest.mark.threads(4)
def test_a_partitioned_network_ends_with_the_weights_of_its_best_epoch_also_when_resumed(
    comm, shared_path
):
    """The checkpoint of the mesh is continued on one rank, and both restore the same."""
    axes = {"pipeline": 2, "filter": 2}

    def patient() -> EarlyStopping:
        return EarlyStopping("loss", 9, mode="max", restore_best=True)  # the first epoch

    trainer = mesh_trainer(comm, axes, patient(), Checkpointer(shared_path), norm=False)
    mesh_fit(trainer, 1)
    comm.barrier()
    first = {name: value.copy() for name, value in trainer.model.state().items()}
    for ranks, given in ((comm, axes), (Serial(), None)):
        again = mesh_trainer(ranks, given, patient(), norm=False)
        load_checkpoint(shared_path, again)
        mesh_fit(again, 3)
        assert again.history[0]["loss"] > again.history[2]["loss"]
        assert_equal_states([again.model.state()], first)
        comm.barrier()


@pytest.mark.threads(4)
def test_loaded_weights_reach_the_parts_of_all_ranks_unless_ranks_alone_have_others(
    comm, shared_path
):
    """Whether rank 0 has loaded them, or some, or all; without it, or from other files, not."""
    other, files = mesh_trainer(Serial(), None, seed=7), [shared_path / name for name in "ab"]
    if comm.rank == 0:
        save_weights(other.model, files[0])
        save_weights(mesh_trainer(Serial(), None).model, files[1])
    comm.barrier()
    mesh_fit(other)
    for ranks in ({0: 0}, {0: 0, 1: 0}, {0: 0, 1: 0, 2: 0, 3: 0}, {3: 0}, {0: 0, 2: 1}):
        trainer = mesh_trainer(comm, CUT)
        if comm.rank in ranks:
            load_weights(trainer.model, files[ranks[comm.rank]])
        if 0 in ranks and 1 not in ranks.values():
            mesh_fit(trainer)
            assert_equal_states([trainer.model.state()], other.model.state())
            assert not trainer.model.given
        else:
            words = "weights that were loaded differ on rank [23] from those on rank 0; load the"
            with pytest.raises(AgreedError, match=words):
                mesh_fit(trainer)


@pytest.mark.threads(4)
def test_changed_whole_parameters_and_statistics_are_those_of_rank_0(comm):
    trainer = mesh_trainer(comm, {"data": 2, "spatial": 2}, optimizer=SGD(0.0))
    (statistic,) = trainer.model.statistics.statistics
    trainer.model.parameters["head.b"].master[...] = statistic.mean[...] = comm.rank + 5
    start_equal(trainer.setup)
    assert (trainer.model.parameters["head.b"].master == 5).all()
    assert (statistic.mean == 5).all()


@pytest.mark.threads(2)
def test_what_cannot_be_on_a_mesh_is_refused(comm):
    mesh = Mesh(comm, spatial=2)
    model = Model(pydtnn.create_net("cnn", 3, SHAPE), SHAPE, backend="numpy", mesh=mesh)
    exact = AllReduce(mesh.data, sums=partial(ExactSums, shards=4))
    filters = Mesh(comm, filter=2)
    cut = Model(Linear(4), (3,), backend="numpy", mesh=filters)
    for given, options, sentence in (
        (model, {"mesh": Mesh(comm, spatial=2)}, "mesh must be that of the model, Mesh(data=1, "),
        (model, {"exchange": AllReduce(comm)}, "AllReduce must be constructed with the ranks of"),
        (model, {"exchange": exact}, "exact training requires gradients that are summed over"),
        (cut, {"mesh": comm}, "mesh must be"),
    ):
        arguments = {"optimizer": SGD(0.1), "progress": False} | options
        with pytest.raises((TypeError, ValueError), match=re.escape(f"Trainer: {sentence}")):
            Trainer(given, **arguments)
    alone = Model(Linear(4), (3,), backend="numpy")
    alone.parameters["linear.b"].group = "data+height"
    with pytest.raises(ValueError, match="linear.b is distributed over the axis height, got no"):
        Trainer(alone, "sgd", exchange=AllReduce(comm))


@pytest.mark.threads(2)
def test_a_step_is_skipped_if_the_part_of_another_rank_is_infinite(comm):
    model = Model(Linear(4), (3,), backend="numpy", dtype="float16", mesh=Mesh(comm, filter=2))
    trainer = Trainer(model, SGD(0.1), progress=False)
    before = checksums(model.state())
    for bucket in model.buckets:
        bucket.grads[...] = np.inf if comm.rank else 1
    trainer.optimizer.step()
    assert trainer.loss_scale is not None
    assert not trainer.loss_scale.passed
    assert checksums(model.state()) == before


def test_stripes_accumulate_running_statistics_of_all_micro_batches():
    rng = np.random.default_rng(0)
    data = ArrayDataset(rng.normal(size=(32, 9, 8, 3)), rng.integers(0, 4, 32))

    def train(comm: Communicator, axes: dict[str, int]) -> dict[str, Any]:
        net = Sequential(Conv2d(6, 3, padding=1), BatchNorm(), ReLU(), GlobalAvgPool2d(), Linear(4))
        model = Model(net, (9, 8, 3), dtype="float64", mesh=Mesh(comm, **axes))
        trainer = Trainer(model, "sgd", accumulation=4, progress=False, metrics=())
        trainer.fit(data, epochs=1, batch_size=16)
        return model.state()

    serial, striped = run_threads(1, train, {})[0], run_threads(2, train, {"spatial": 2})[1]
    for name, array in serial.items():
        np.testing.assert_allclose(striped[name], array, rtol=1e-12, atol=1e-15)
