"""Training with compressed gradients: it learns, on all ranks alike, and can be continued."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator
from pydtnn.data import ArrayDataset
from pydtnn.layers import Linear, ReLU, Sequential
from pydtnn.model import Model
from pydtnn.optimizers import SGD
from pydtnn.parallel.compression import COMPRESSORS, create_sums
from pydtnn.parallel.exchange import AllReduce
from pydtnn.parallel.schemes import ShardedOptimizer, StaleGradients
from pydtnn.tools.testing import check_scheme
from pydtnn.training.trainer import Trainer
from tests.each import each

OPTIONS: dict[str, dict[str, Any]] = {
    "float16": {},
    "bfloat16": {},
    "int8": {},
    "top_k": {"share": 0.05},
    "random_k": {"share": 0.3},
    "sign": {"block": 16},
    "sign_vote": {},
    "dgc": {"share": 0.05, "momentum": 0.5, "warm_up": 4},
    "power_sgd": {"rank": 1},
}


def problem() -> ArrayDataset:
    """A classification of which a linear one gets most."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(93, 12))
    return ArrayDataset(x, (x @ rng.normal(size=(12, 3))).argmax(axis=1))


def trained(
    comm: Communicator, dtype: str, lr: float = 0.3, **options: Any
) -> tuple[list[float], Model]:
    net = Sequential(Linear(24), ReLU(), Linear(3))
    model = Model(net, (12,), backend="numpy", dtype=dtype, bucket_bytes=512)
    assert len(model.buckets) > 1
    trainer = Trainer(model, SGD(lr, momentum=0.5), exchange=AllReduce(comm, **options))
    history = trainer.fit(problem(), epochs=6, global_batch_size=16)
    return [logs["loss"] for logs in history], model


def test_every_compressor_is_tried():
    assert set(OPTIONS) == set(COMPRESSORS)


@pytest.mark.threads(1, 2, 3)
@pytest.mark.mpi(2)
@each("dtype", ["float32", "float64"])
@each("name", COMPRESSORS)
def test_training_learns_and_ends_with_equal_parameters(comm, name, dtype):
    lr = 0.02 if name == "sign_vote" else 0.3  # the length of its steps
    losses, model = trained(comm, dtype, lr, sums=create_sums(name, **OPTIONS[name]))
    assert losses[-1] < 0.4 * losses[0]  # uncompressed: 0.19 times
    own = [bucket.values.tobytes() for bucket in model.buckets]
    assert all(other == own for other in comm.gather_object(own))


@pytest.mark.threads(2)
@each("name", COMPRESSORS)
def test_overlap_does_not_change_a_bit(comm, name):
    models = [
        trained(comm, "float32", sums=create_sums(name, **OPTIONS[name]), overlap=overlap)[1]
        for overlap in (True, False)
    ]
    first, second = ([b.values.tobytes() for b in model.buckets] for model in models)
    assert first == second


@pytest.mark.threads(1, 2)
@pytest.mark.mpi(2)
def test_power_sgd_of_full_rank_is_plain_training(comm):
    plain, wanted = trained(comm, "float64")
    losses, model = trained(comm, "float64", sums=create_sums("power_sgd", rank=24))
    np.testing.assert_allclose(losses, plain, rtol=1e-10)
    for given, bucket in zip(model.buckets, wanted.buckets, strict=True):
        np.testing.assert_allclose(given.values, bucket.values, rtol=0, atol=1e-10)


WAYS = [  # of exchanging
    *((AllReduce, name) for name in COMPRESSORS if name != "bfloat16"),
    *((ShardedOptimizer, "sign"), (StaleGradients, "power_sgd")),
]


@pytest.mark.parametrize(("scheme", "name"), WAYS)
def test_schemes_keep_their_contract_with_compressed_gradients(scheme, name):
    compressed = partial(scheme, sums=create_sums(name, **OPTIONS[name]))
    check_scheme(compressed, ranks=[3], equal_to_serial=False)
