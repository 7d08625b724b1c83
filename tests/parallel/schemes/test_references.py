"""Schemes and compressors beside the same methods in NumPy, with which they share nothing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator, Serial, run_threads
from pydtnn.optimizers import SGD, Adam, AdamW
from pydtnn.parallel.compression import create_sums
from pydtnn.parallel.exchange import AllReduce, GradientExchange
from pydtnn.parallel.schemes import DiLoCo, OneBitAdam, StreamingDiLoCo, create_scheme
from pydtnn.tools.testing import check_scheme
from tests.each import each
from tests.fuzz.reference_training import COMPRESSED, STEPS, Ranks, Rule
from tests.fuzz.test_schemes import Drawn
from tests.parallel.schemes.course import trainer_of

STREAMED = {"period": 6, "delay": 2, "mixing": 0.3, "rate": 0.6, "momentum": 0.5}

CASES: list[tuple[str, dict[str, Any], str]] = [
    ("diloco", {"period": 7, "rate": 0.7, "momentum": 0.6}, "adamw"),
    ("streaming_diloco", STREAMED, "adamw"),
    ("slow_momentum", {"period": 6, "rate": 0.9, "momentum": 0.6}, "momentum"),
    ("one_bit_adam", {"warm_up": 30}, "adamw"),
    ("sign_vote", {"momentum": 0.9}, "plain"),
    ("dgc", {"share": 0.1, "momentum": 0.8, "warm_up": 0}, "plain"),
    ("dgc", {"share": 0.05, "momentum": 0.8, "warm_up": 20}, "plain"),
]


class Long(Drawn):
    """Of a scheme or, with all-reduce, a compressor."""

    def exchange(self, comm: Communicator) -> GradientExchange:
        if self.scheme in STEPS:
            return super().exchange(comm)
        return AllReduce(comm, sums=create_sums(self.scheme, **self.options))


def long_run(scheme: str, options: dict[str, Any], rule: str, ranks: int) -> Drawn:
    """40 epochs of 5 steps, the last of which has one sample."""
    drawn = Long(np.random.default_rng(0))
    drawn.__dict__.update(scheme=scheme, options=options, overlap={}, ranks=ranks, rule=rule)
    drawn.__dict__.update(samples=37, batch=9, epochs=40, accumulation=1, validated=3)
    drawn.__dict__.update(allreduce="vendor", hosts=[0] * ranks)
    one = scheme not in STEPS or scheme in ("streaming_diloco", "decoupled_diloco", "one_bit_adam")
    drawn.bucket_bytes = 1 << 20 if one else 100
    drawn.net.sizes = [4, 5, 3]
    rng = np.random.default_rng(1)
    drawn.x, drawn.y = rng.normal(size=(40, 4)), rng.integers(3, size=40)
    drawn.rule_options = {"weight_decay": 0.05, "clip_norm": None}
    drawn.rule_options["lr"] = lambda step: 0.05 / (1 + 0.01 * step)
    if rule in ("plain", "momentum"):
        drawn.rule = "sgd"
        drawn.rule_options |= {"momentum": 0.5 * (rule == "momentum"), "nesterov": False}
    else:
        drawn.rule_options["epsilon"] = 1e-3
    return drawn


@pytest.mark.few(4)
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("scheme", "options", "rule"), CASES)
def test_200_steps_are_those_of_the_method_in_numpy(scheme, options, rule, ranks):
    drawn = long_run(scheme, options, rule, ranks)
    (expected, *_), history = drawn.reference()
    for ours, logs in run_threads(ranks, drawn.train):
        np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-12)
        assert logs[-1]["loss"] == pytest.approx(history[-1]["loss"], rel=1e-12)


# -- what check_scheme finds


def reference(name: str, **options: Any) -> Any:
    """The method as `check_scheme` takes it, with plain SGD."""
    rule: dict[str, Any] = {"lr": lambda step: 0.02, "momentum": 0.0, "nesterov": False}
    rule |= {"weight_decay": 0.0, "clip_norm": None}

    def run(w: np.ndarray, steps: Any) -> Iterator[np.ndarray]:
        rules = [Rule("sgd", rule, np.zeros(1)) for _ in w]
        ranks = Ranks(w, rules, options, np.zeros(len(w)), w[0].copy())
        for gradients, samples in steps:
            ranks.samples += samples
            (STEPS | COMPRESSED)[name](ranks, gradients(ranks.w), samples)
            yield ranks.w

    return run


class DiLoCoWithoutAverage(DiLoCo):
    """Each rank takes outer steps of its own."""

    def average_parameters(self) -> None:
        self.met = True


def test_one_bit_adam_requires_adamw():
    for rule in (SGD(0.1), Adam(0.1), AdamW(0.1, clip_norm=1.0)):
        with pytest.raises(ValueError, match="OneBitAdam: expected AdamW without clip_norm, got"):
            trainer_of(OneBitAdam(Serial()), rule)


@pytest.mark.long
def test_one_bit_adam_continues_in_the_same_bytes():
    options: dict[str, Any] = {"equal_to_serial": False, "optimizer": lambda: AdamW(0.02)}
    check_scheme(partial(OneBitAdam, warm_up=4), ranks=[3], **options)


class DiLoCoWithoutState(DiLoCo):
    def state(self):
        return super().state() | {
            name: 0 * v for name, v in super().state().items() if "vel" in name
        }


KEPT = {"period": 4, "rate": 0.6, "momentum": 0.5}


# -- messages and bytes: the formulas of docs/communication.md


def counted(comm: Communicator, name: str, options: dict[str, Any], steps: int) -> tuple[int, int]:
    """Calls and bytes of the scheme alone in some steps."""
    exchange = create_scheme(name, comm, **options)
    rule = AdamW(0.1) if name == "one_bit_adam" else SGD(0.1)
    trainer = trainer_of(exchange, rule)
    exchange.start(trainer.model.buckets)
    traffic = exchange.comm.traffic
    messages, sent = traffic.messages, traffic.bytes
    for _ in range(steps):
        exchange.samples += 1
        for bucket in exchange.buckets:
            exchange.bucket_ready(bucket)
        exchange.update(trainer.optimizer)
    exchange.in_flight.wait()
    return traffic.messages - messages, traffic.bytes - sent


@pytest.mark.threads(1, 3)
def test_schemes_send_what_their_formulas_say(comm):
    buckets = trainer_of(create_scheme("allreduce", comm), SGD(0.1)).model.buckets
    b, n, p = len(buckets), sum(bucket.values.nbytes for bucket in buckets), comm.size
    assert b > 1
    share = 2 * (p - 1) / p
    for name, options, messages, sent in [
        ("diloco", {"period": 5}, 4 * (1 + b), 4 * share * (8 + n)),
        ("streaming_diloco", {"period": 5}, 4 * b, 4 * share * n),
        ("slow_momentum", {"period": 10}, 2 * (1 + b), 2 * share * (8 + n)),
        ("one_bit_adam", {"warm_up": 20}, 20 * b, 20 * share * n),
    ]:
        found = counted(comm, name, options, 20)
        assert found == (messages, pytest.approx(sent, abs=messages)), name


def sent_in_a_step(comm: Communicator, name: str, **options: Any) -> tuple[int, int]:
    """Messages and bytes of a bucket's sum, of the second step."""
    (bucket,) = trainer_of(AllReduce(comm), SGD(0.1), bucket_bytes=1 << 20).model.buckets
    sums = create_sums(name, **options)(comm)
    sums.prepare((bucket,))
    bucket.grads[...] = np.random.default_rng(comm.rank).normal(size=len(bucket.grads))
    sums.start(bucket).wait()
    messages, sent = comm.traffic.messages, comm.traffic.bytes
    sums.start(bucket).wait()
    return comm.traffic.messages - messages, comm.traffic.bytes - sent


N = 7 * 5 + 7 + 7 + 7 + 6 * 7 + 6 + 3 * 6 + 3
"""Parameters of the network of `course`."""


@pytest.mark.threads(1, 3)
def test_compressors_send_what_their_formulas_say(comm):
    """Votes to a server and back; of DGC, indices and values to all others."""
    p, k = comm.size, int(np.ceil(0.1 * N))
    parts = np.array([-(-len(part) // 5) for part in np.array_split(np.zeros(N), p)])
    expected = parts.sum() + (p - 2) * parts[comm.rank]
    assert sent_in_a_step(comm, "sign_vote") == (2 * (p - 1), expected)
    indices = -(-4 * k // 8) * 8  # values follow at a multiple of 8
    assert sent_in_a_step(comm, "dgc", share=0.1) == (p - 1, (p - 1) * (indices + 8 * k))
    # in the warm-up, a quarter, with the two lengths in a message of their own
    k = int(np.ceil(0.25 * N))
    lengths, message = 2 * 8, -(-4 * k // 8) * 8 + 8 * k
    sent = sent_in_a_step(comm, "dgc", share=0.1, warm_up=10)
    assert sent == (2 * (p - 1), (p - 1) * (lengths + message))


@each(
    ("broken", "sentence"),
    [
        (DiLoCoWithoutAverage, "rank . .* the reference after step 4"),
        (DiLoCoWithoutState, r"resumed .* load\(\) must include all"),
    ],
)
def test_check_scheme_refuses_broken_variants(broken, sentence):
    options: dict[str, Any] = {"equal_to_serial": False, "optimizer": lambda: SGD(0.02)}
    method = reference("diloco", **KEPT)
    with pytest.raises(AssertionError, match=sentence):
        check_scheme(partial(broken, **KEPT), ranks=[3], reference=method, **options)


def test_a_rank_takes_a_part_of_the_average_at_least():
    with pytest.raises(ValueError, match="mixing must be .* and below 1, got 1"):
        StreamingDiLoCo(Serial(), period=6, mixing=1.0)
