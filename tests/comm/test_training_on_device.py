"""Schemes on arrays of a device: the bytes of training on the host, whatever carries them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator
from pydtnn.optimizers import SGD, Optimizer
from pydtnn.parallel.compression import create_sums
from pydtnn.parallel.exchange import AllReduce
from pydtnn.parallel.schemes import create_scheme
from pydtnn.parallel.schemes.sharded import ShardedOptimizer
from pydtnn.training.capabilities import why_not
from pydtnn.training.trainer import Trainer
from tests.comm.devices import TRANSPORTS, device_of, reference_on
from tests.parallel.schemes.course import CASES, Weights, fit, trainer_of


def momentum() -> Optimizer:
    return SGD(0.1, momentum=0.9, weight_decay=0.01)


def on_device(
    comm: Communicator, transport: str, scheme: Any, rule: Any = momentum, **options: Any
) -> Trainer:
    """Make a trainer whose arrays are a device's."""
    xp = device_of(comm)
    exchange = scheme(TRANSPORTS[transport](comm, xp))
    trainer = trainer_of(exchange, rule(), backend=reference_on(xp), **options)
    assert all(isinstance(bucket.grads, xp.ndarray) for bucket in trainer.model.buckets)
    return trainer


def assert_same(ours: Weights, expected: Weights) -> None:
    assert {name: value.tobytes() for name, value in ours.items()} == {
        name: value.tobytes() for name, value in expected.items()
    }


def check(comm: Communicator, transport: str, scheme: Any, rule: Any = momentum) -> None:
    """Train on the device and on the host, with an evaluation, and compare."""
    ours = on_device(comm, transport, scheme, rule)
    expected = trainer_of(scheme(comm), rule())
    assert_same(fit(ours, 1), fit(expected, 1))
    assert ours.history == expected.history
    comm.barrier()  # nobody's device leaves before the others have heard of it


@pytest.mark.threads(3)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_a_scheme_trains_to_the_bytes_of_the_host(comm, transport, name, options):
    check(comm, transport, lambda comm: create_scheme(name, comm, **options))


@pytest.mark.threads(2)
@pytest.mark.parametrize("transport", ["nccl", "staged"])
@pytest.mark.parametrize("scheme", [AllReduce, ShardedOptimizer])
@pytest.mark.parametrize("name", ["float16", "top_k", "power_sgd"])
def test_compressors_work_on_the_gradients_of_a_device(comm, transport, scheme, name):
    """Summed on the way, gathered, and in two rounds."""
    check(comm, transport, partial(scheme, sums=create_sums(name)))


@pytest.mark.threads(2)
@pytest.mark.parametrize("name", ["elastic", "stale", "local_sgd", "sharded"])
def test_state_is_on_the_host_and_goes_back_to_a_device(comm, name):
    trainer = on_device(comm, "nccl", partial(create_scheme, name))
    fit(trainer, 1)
    state = trainer.exchange.state()
    arrays = {key: value for key, value in state.items() if isinstance(value, np.ndarray)}
    assert len(arrays) == sum(not isinstance(value, int | float) for value in state.values())
    other = on_device(comm, "staged", partial(create_scheme, name))
    other.exchange.start(other.model.buckets)
    other.exchange.load(state)
    again = other.exchange.state()
    assert {key: again[key].tobytes() for key in arrays} == {
        key: value.tobytes() for key, value in arrays.items()
    }
    comm.barrier()


@pytest.mark.threads(2)
def test_what_cannot_be_captured_is_told(comm):
    for transport, scheme, words in (
        ("nccl", partial(create_scheme, "gossip"), "the steps of Gossip are not all alike"),
        ("nccl", partial(AllReduce, sums=create_sums("sign")), "CompressedSums works on the host"),
        ("staged", AllReduce, "messages go by way of MPI"),
        ("handed", AllReduce, "messages go by way of MPI"),
        ("nccl", type("Mine", (AllReduce,), {}), "the steps of Mine are not all alike"),
        ("nccl", AllReduce, ""),
    ):
        reason = why_not("CUDA graph", on_device(comm, transport, scheme).setup)
        assert reason.startswith(words)
        assert bool(words) == bool(reason)
