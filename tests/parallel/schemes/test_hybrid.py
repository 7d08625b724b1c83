"""Hybrid sharding: state, gradients and parameters are divided within each of several copies."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from pydtnn import Mesh
from pydtnn.cli.build import create_job
from pydtnn.cli.parallel import create_mesh, describe_mesh
from pydtnn.cli.parser import parse
from pydtnn.comm import Communicator, Serial, run_threads
from pydtnn.optimizers import Adam
from pydtnn.parallel.compression import create_sums
from pydtnn.parallel.exchange import AllReduce
from pydtnn.parallel.reproducible import ExactSums
from pydtnn.parallel.schemes import ShardedGradients, ShardedOptimizer, ShardedParameters
from pydtnn.tools.testing import check_scheme
from pydtnn.training.mesh import choose_exchange
from pydtnn.utils.errors import RankError
from tests.each import each
from tests.parallel.schemes.course import RULES, assert_close, fit, train_serially, trainer_of
from tests.parallel.schemes.test_sharded_parameters import train
from tests.small_mesh import assert_equal_states, mesh_fit, mesh_trainer, on_ranks
from tests.small_run import TINY

SCHEMES: list[Any] = [ShardedOptimizer, ShardedGradients, ShardedParameters]

every_scheme = pytest.mark.parametrize("scheme", SCHEMES)


EXACT: Any = {"exchange": {"sums": partial(ExactSums, shards=7)}, "batch": 7}


@pytest.fixture(scope="module")
def one_rank() -> Any:
    return train(Serial(), AllReduce, "vit", **EXACT)


@pytest.mark.threads(4, 6)
@every_scheme
def test_exact_sums_give_the_bytes_of_one_rank(comm, scheme, one_rank):
    losses, state = one_rank
    ours, mine = train(comm, partial(scheme, copies=2), "vit", **EXACT)
    assert ours == losses
    assert all(mine[key].tobytes() == value.tobytes() for key, value in state.items())


@pytest.mark.threads(4, 6)
@every_scheme
@pytest.mark.parametrize("copies", [1, 2])
def test_state_and_messages_are_those_of_the_formula(comm, scheme, copies):
    """A copy divides the state; an update sends its parts, and ZeRO-3 gathers before."""
    exchange = scheme(comm, copies=copies)
    trainer = trainer_of(exchange, Adam(0.1), metrics=())
    buckets, p = trainer.model.buckets, comm.size // copies
    n = trainer.model.buffers[0].values.nbytes
    sizes = [slot.nbytes for slots in trainer.optimizer._slots.values() for slot in slots]
    sizes = comm.gather_object(sum(sizes))
    assert sizes == copies * sizes[:p]
    assert sum(sizes[:p]) == 2 * n
    assert max(sizes) - min(sizes) <= 2 * 2 * 64  # cuts lie between cache lines
    exchange.start(buckets)
    traffic = comm.traffic
    before, sent = traffic.messages, traffic.bytes
    if scheme is ShardedParameters:
        own = [bucket.values[exchange.local_slice(bucket)].nbytes for bucket in buckets]
        exchange.before_layer(buckets, [])
        assert traffic.messages - before == (p - 1) * np.count_nonzero(own)
        assert traffic.bytes - sent == (p - 1) * sum(own)
        before, sent = traffic.messages, traffic.bytes
    for bucket in buckets:
        bucket.grads[...] = 1
        exchange.bucket_ready(bucket)
    exchange.update(trainer.optimizer)
    messages, total = traffic.messages - before, np.array([traffic.bytes - sent])
    comm.allreduce(total)
    gathers = scheme is not ShardedParameters
    assert messages == (copies + gathers) * len(buckets)
    share = (1 + gathers) * (p - 1) / p + 2 * (1 - 1 / copies) / p
    assert total[0] == pytest.approx(comm.size * share * n, abs=comm.size * messages)


@each(("ranks", "copies"), [(3, 3), (6, 3)])
@each("rule", ["adam", "clipped_lars"])
def test_every_division_computes_what_one_rank_does(ranks, copies, rule):
    def rank(comm: Communicator) -> Any:
        with comm:
            exchange = ShardedParameters(comm, copies=copies)
            trained = fit(trainer_of(exchange, RULES[rule]()), 2)
            exchange.free()
            return trained

    expected = train_serially(RULES[rule](), 2)
    for ours in run_threads(ranks, rank):
        assert_close(ours, expected)


@each("axes", [{"data": 2, "shard": 2, "filter": 2}, {"shard": 2, "pipeline": 2}])
def test_the_axis_shard_is_one_of_samples(axes):
    norm = "pipeline" not in axes

    def rank(comm: Communicator) -> Any:
        scheme = partial(ShardedParameters, copies=axes.get("data", 1))
        trainer = mesh_trainer(comm, axes, scheme=scheme, norm=norm)
        assert trainer.setup.data.size == axes.get("data", 1) * axes["shard"]
        mesh_fit(trainer)
        return trainer.model.state()

    serial = mesh_trainer(Serial(), None, norm=norm)
    mesh_fit(serial)
    assert_equal_states(on_ranks(axes, rank), serial.model.state())


def test_what_is_not_defined_is_refused_in_one_sentence():
    def rank(comm: Communicator) -> None:
        with pytest.raises(ValueError, match="copies must divide the 4 ranks, .* got 3$"):
            ShardedOptimizer(comm, copies=3)
        with pytest.raises(ValueError, match="be 1 with compressed sums, got 2$"):
            ShardedGradients(comm, copies=2, sums=create_sums("sign"))
        mesh = Mesh(comm, data=2, shard=2)
        assert (mesh.shape, mesh.copies) == ({"data": 4}, 2)
        sentence = r"the axis shard requires .* use ShardedParameters\(mesh.data, copies=2\)$"
        for exchange in (None, AllReduce(mesh.data), ShardedOptimizer(mesh.data)):
            with pytest.raises(ValueError, match=sentence):
                choose_exchange(exchange, mesh)

    run_threads(4, rank)


def test_the_command_line_divides_over_the_axis_shard(tmp_path):
    given = [*TINY, "--parallel=data=2,shard=2"]

    def rank(comm: Communicator, *more: str) -> Any:
        config = parse([*given, *more])
        mesh = create_mesh(config.parallel, comm)
        assert mesh is not None
        assert describe_mesh(mesh) == "data 4, in 2 copies"
        return create_job(config, comm, 1, tmp_path, mesh).trainer.exchange.copies

    assert run_threads(4, rank, "--scheme=sharded_parameters") == [2] * 4
    for more, sentence in (
        ([], "--parallel shard: allreduce has no parameter `copies`; omit it or use sharded"),
        (["--scheme=sharded", '--scheme-options={"copies": 4}'], "copies=2"),
        (["--scheme=sharded", "--compress=sign"], "be 1 with compressed sums, got 2"),
    ):
        with pytest.raises(RankError, match=sentence):
            run_threads(4, rank, *more)


@pytest.mark.long
def test_check_scheme_passes():
    check_scheme(partial(ShardedParameters, copies=2), ranks=[4])
