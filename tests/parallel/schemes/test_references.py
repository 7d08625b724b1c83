"""Schemes that communicate rarely, beside the same methods in NumPy, in which nothing is shared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator, run_threads
from pydtnn.optimizers import SGD
from pydtnn.parallel.exchange import GradientExchange
from pydtnn.parallel.schemes import DiLoCo, create_scheme
from pydtnn.testing import check_scheme
from tests.fuzz.reference_training import STEPS, Ranks, Rule
from tests.fuzz.test_schemes import Drawn
from tests.parallel.schemes.course import trainer_of

CASES: list[tuple[str, dict[str, Any], str]] = [
    ("diloco", {"period": 7, "rate": 0.7, "momentum": 0.6}, "adamw"),
]


def long_run(scheme: str, options: dict[str, Any], rule: str, ranks: int) -> Drawn:
    """40 epochs of 5 steps, the last of which has one sample."""
    drawn = Drawn(np.random.default_rng(0))
    drawn.__dict__.update(scheme=scheme, options=options, overlap={}, ranks=ranks, rule=rule)
    drawn.__dict__.update(samples=37, batch=9, epochs=40, accumulation=1, validated=3)
    drawn.__dict__.update(allreduce="vendor", hosts=[0] * ranks, bucket_bytes=100)
    drawn.net.sizes = [4, 5, 3]
    rng = np.random.default_rng(1)
    drawn.x, drawn.y = rng.normal(size=(40, 4)), rng.integers(3, size=40)
    drawn.rule_options = {"weight_decay": 0.05, "clip_norm": None, "lr": lambda step: 0.05}
    extra = {"momentum": 0.5, "nesterov": False} if rule == "sgd" else {"epsilon": 1e-3}
    drawn.rule_options |= extra
    return drawn


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("scheme", "options", "rule"), CASES)
def test_200_steps_are_those_of_the_method_in_numpy(
    scheme: str, options: dict[str, Any], rule: str, ranks: int
) -> None:
    drawn = long_run(scheme, options, rule, ranks)
    (expected, *_), history = drawn.reference()
    for ours, logs in run_threads(ranks, drawn.fit):
        np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-12)
        assert logs[-1]["loss"] == pytest.approx(history[-1]["loss"], rel=1e-12)


# -- what check_scheme finds


def reference(name: str, **options: Any) -> Any:
    """The method as `check_scheme` takes it, with plain SGD."""
    rule: dict[str, Any] = {"lr": lambda step: 0.2, "momentum": 0.0, "nesterov": False}
    rule |= {"weight_decay": 0.0, "clip_norm": None}

    def run(w: np.ndarray, steps: Any) -> Iterator[np.ndarray]:
        rules = [Rule("sgd", rule, np.zeros(1)) for _ in w]
        ranks = Ranks(w, rules, options, np.zeros(len(w)), w[0].copy())
        for gradients, samples in steps:
            ranks.samples += samples
            STEPS[name](ranks, gradients(ranks.w), samples)
            yield ranks.w

    return run


class DiLoCoWithoutAverage(DiLoCo):
    """Each rank takes outer steps of its own."""

    def average_parameters(self) -> None:
        self.met = True


class DiLoCoWithoutMomentum(DiLoCo):
    def outer_step(self, outer, velocity, change, lr):
        outer -= self.rate * change


class DiLoCoWithoutState(DiLoCo):
    def state(self):
        return super().state() | {
            name: 0 * v for name, v in super().state().items() if "vel" in name
        }


KEPT = {"period": 4, "rate": 0.6, "momentum": 0.5}


def test_check_scheme_compares_each_step_with_the_reference() -> None:
    method = reference("diloco", **KEPT)
    check = {"ranks": [1, 3], "optimizer": lambda: SGD(0.2), "tolerance": 1e-12}
    check_scheme(lambda comm: DiLoCo(comm, **KEPT), reference=method, **check)


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (DiLoCoWithoutAverage, "rank . differ from those of the reference after step 4"),
        (DiLoCoWithoutMomentum, "rank 0 differ from those of the reference after step 4"),
        (DiLoCoWithoutState, r"resumed after step 10: .* load\(\) must include all state"),
    ],
)
def test_check_scheme_refuses_broken_variants(
    broken: Callable[..., GradientExchange], sentence: str
) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_scheme(
            lambda comm: broken(comm, **KEPT),
            ranks=[3],
            optimizer=lambda: SGD(0.2),
            reference=reference("diloco", **KEPT),
        )


# -- messages and bytes: the formulas of docs/communication.md


def counted(comm: Communicator, name: str, options: dict[str, Any], steps: int) -> tuple[int, int]:
    """Calls and bytes of the scheme alone in some steps."""
    exchange = create_scheme(name, comm, **options)
    trainer = trainer_of(exchange, SGD(0.1))
    exchange.start(trainer.model.buckets)
    traffic = exchange.comm.traffic
    messages, sent = traffic.messages, traffic.bytes
    for _ in range(steps):
        exchange.samples += 1
        for bucket in exchange.buckets:
            exchange.bucket_ready(bucket)
        exchange.update(trainer.optimizer)
    return traffic.messages - messages, traffic.bytes - sent


@pytest.mark.threads(1, 2, 3, 4)
def test_diloco_sends_all_parameters_every_period(comm: Communicator) -> None:
    buckets = trainer_of(create_scheme("allreduce", comm), SGD(0.1)).model.buckets
    assert len(buckets) > 1
    share = 2 * (comm.size - 1) / comm.size
    n = sum(len(bucket.values) for bucket in buckets)
    messages, sent = counted(comm, "diloco", {"period": 5}, 20)
    assert messages == 4 * (1 + len(buckets))
    assert sent == pytest.approx(4 * share * (8 + 8 * n), abs=4 * (1 + len(buckets)))
