"""Training between hosts with nothing set: schedules and shorter buckets, and the same results."""

from __future__ import annotations

import numpy as np

from pydtnn import ArrayDataset, Mesh
from pydtnn.comm import Communicator, Serial, run_threads
from pydtnn.comm.schedules.rule import FIRST_BUCKET_DIVISOR, MIN_FIRST_BUCKET_BYTES, by_rule
from pydtnn.layers import Linear, ReLU, Sequential
from pydtnn.layers.parameters import DEFAULT_BUCKET_BYTES
from pydtnn.model import Model
from pydtnn.optimizers import SGD
from pydtnn.parallel.exchange import AllReduce
from pydtnn.parallel.reproducible import ExactSums
from pydtnn.training.trainer import Trainer


def wide(**options: object) -> Model:
    """Gradients of 2.0 MB: of three large matrices and what is small."""
    net = Sequential(Linear(500), ReLU(), Linear(500), ReLU(), Linear(300), ReLU(), Linear(3))
    return Model(net, (200,), backend="numpy", **options)


def cut(comm: Communicator, model: Model, **options: object) -> list[int]:
    Trainer(model, SGD(0.1), exchange=AllReduce(comm, **options))
    return [bucket.grads.nbytes for bucket in model.buckets]


def test_buckets_are_shorter_between_hosts_and_values_stay():
    def rank(comm):
        model, usual = wide(), wide()
        before = {name: p.master.copy() for name, p in model.parameters.items()}
        lengths = cut(by_rule(comm), model)
        for name, p in model.parameters.items():
            np.testing.assert_array_equal(p.master, before[name])
            assert p.master.base is not None
            assert np.shares_memory(p.master, model.buffers[0].values)
        return lengths, cut(Serial(), usual)

    (lengths, usual), other = run_threads(2, rank, hosts="ab")
    assert (lengths, usual) == other
    assert sum(lengths) == sum(usual)
    assert (len(usual), len(lengths)) == (2, 3)  # closed by the matrix that fills them
    assert lengths[0] >= max(MIN_FIRST_BUCKET_BYTES, sum(lengths) // FIRST_BUCKET_DIVISOR)


def test_buckets_are_as_they_were_inside_a_host_and_where_the_cut_would_show():
    def between(comm):
        given = cut(comm, wide(bucket_bytes=DEFAULT_BUCKET_BYTES))
        return given, cut(comm, wide(), sums=lambda group: ExactSums(group, shards=2))

    usual = cut(Serial(), wide())
    assert run_threads(2, between, hosts="ab") == [(usual, usual)] * 2
    assert run_threads(2, lambda comm: cut(comm, wide()), hosts="aa") == [usual] * 2


def test_buckets_are_settled_by_the_first_trainer():
    """A second one must not take the arrays away that the first one's optimizer holds."""

    def rank(comm):
        model = wide()
        usual = cut(Serial(), model)
        values = model.buffers[0].values
        assert cut(by_rule(comm), model) == usual
        assert model.buffers[0].values is values

    run_threads(2, rank, hosts="ab")


def test_two_ranks_with_the_same_stages_have_the_same_buckets_wherever_the_others_are():
    """Their groups along "data" are inside a host and between hosts, or not."""

    def rank(comm):
        with Mesh(comm, data=2, pipeline=2) as mesh:
            model = wide(mesh=mesh, pipeline_schedule="chimera")
            trainer = Trainer(model, SGD(0.1), exchange=AllReduce(by_rule(mesh.data)), mesh=mesh)
            x = np.random.default_rng(0).normal(size=(16, 200))
            trainer.fit(ArrayDataset(x, np.arange(16) % 3), epochs=1, global_batch_size=16)
            return len(model.buckets)

    assert run_threads(4, rank, hosts="aaab") == [2] * 4
    assert run_threads(4, rank, hosts="aabb") == [3] * 4
