"""Optimizers beside the formulas of their authors, over 200 steps and on ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from pydtnn.callbacks import EMA
from pydtnn.comm import run_threads
from pydtnn.optimizers import Optimizer, ScheduleFreeAdamW
from pydtnn.parallel.schemes import SCHEMES, LocalSGD
from pydtnn.schedules import Constant, WarmUp
from pydtnn.training.callback import evaluated
from pydtnn.training.trainer import Trainer
from pydtnn.utils.errors import AgreedError, RankError
from tests.each import each
from tests.parallel.schemes.course import Weights, assert_close, train, train_serially, weights
from tests.small_training import Recorder, small_data, small_fit, small_trainer
from tests.test_optimizers import DECAY, LR, bound, draw_gradients, values

Rule = Iterator[np.ndarray]


def schedule_free(w: np.ndarray, decay: float) -> Rule:
    """Algorithm 1 of Defazio et al. 2024, with its three sequences; yields y and x in turn."""
    z = x = w
    v, total, t, beta = np.zeros_like(w), 0.0, 0, 0.9
    while True:
        y = (1 - beta) * z + beta * x
        yield x
        g = yield y
        t += 1
        v = 0.999 * v + 0.001 * g**2
        gamma = LR * min(1, t / 11) * np.sqrt(1 - 0.999**t)
        z = z - gamma * g / (np.sqrt(v) + 1e-8) - gamma * decay * y
        total += gamma**2
        x = (1 - gamma**2 / total) * x + gamma**2 / total * z


def test_schedule_free_adamw_has_the_sequences_of_its_authors(backend):
    rule = ScheduleFreeAdamW(WarmUp(Constant(LR), 10), weight_decay=DECAY)
    optimizer, buffer = bound(backend, rule, bucket_bytes=300)
    expected = {
        name: schedule_free(w, 0.0 if name == "b" else DECAY) for name, w in values(buffer).items()
    }
    rng = np.random.default_rng(0)
    for sequence in expected.values():
        next(sequence)
        next(sequence)
    for _ in range(200):
        g = draw_gradients(buffer, rng)
        optimizer.step()
        averages = {name: sequence.send(g[name]) for name, sequence in expected.items()}
        for name, w in values(buffer).items():
            np.testing.assert_allclose(w, next(expected[name]), rtol=1e-12, atol=1e-12)
        with optimizer.evaluated(), optimizer.evaluated():
            for name, w in values(buffer).items():
                np.testing.assert_allclose(w, averages[name], rtol=1e-12, atol=1e-12)


ON_RANKS: dict[str, Callable[[], Optimizer]] = {
    "schedule_free": lambda: ScheduleFreeAdamW(0.02, weight_decay=0.01, clip_norm=0.5),
}


@pytest.mark.threads(1, 2, 3, 4)
@pytest.mark.parametrize("scheme", ["allreduce", *(name for name in SCHEMES if "shard" in name)])
@pytest.mark.parametrize("rule", ON_RANKS)
def test_ranks_compute_what_one_does(comm, scheme, rule):
    ours = train(SCHEMES[scheme](comm), ON_RANKS[rule](), 2)
    assert_close(ours, train_serially(ON_RANKS[rule](), 2))


def test_the_average_is_evaluated_kept_and_where_further_training_starts():
    seen: list[tuple[Weights, float]] = []

    def look(trainer: Trainer) -> None:
        trained = weights(trainer)
        with evaluated(trainer):
            seen.append((weights(trainer), trainer.logs["val_loss"]))
        assert all((weights(trainer)[name] == w).all() for name, w in trained.items())
        assert (trained["head.w"] != seen[-1][0]["head.w"]).all()

    trainer = small_trainer(None, Recorder(on_epoch=look), optimizer=ScheduleFreeAdamW(0.05))
    small_fit(trainer)
    assert all((weights(trainer)[name] == w).all() for name, w in seen[1][0].items())
    for average, loss in seen:
        other = small_trainer()
        other.model.load(average)
        assert other.evaluate(small_data()[1])["loss"] == pytest.approx(loss, rel=1e-12)
    small_fit(trainer, 3)
    assert (weights(trainer)["head.w"] != seen[1][0]["head.w"]).all()


@each(
    ("call", "words"),
    [
        (lambda c, o: small_trainer(c, optimizer=o, exchange=LocalSGD(c)), "got LocalSGD; use"),
        (lambda c, o: small_fit(small_trainer(c, EMA(), optimizer=o)), "EMA|got ScheduleFree"),
    ],
)
def test_what_has_another_average_is_refused(call, words):
    with pytest.raises((AgreedError, RankError), match=words):
        run_threads(2, lambda comm: call(comm, ScheduleFreeAdamW()))
