"""Running statistics in flat arrays."""

from __future__ import annotations

import numpy as np

from pydtnn.kernels import create_backend
from pydtnn.layers.statistics import RunningStatistics, Statistic


def make(*layers: tuple[int, float]) -> tuple[list[Statistic], RunningStatistics]:
    statistics = [Statistic(f"bn{i}", c, momentum) for i, (c, momentum) in enumerate(layers)]
    return statistics, RunningStatistics(statistics, create_backend("numpy"))


def see(statistic: Statistic, x: np.ndarray) -> None:
    """Add rows, as batch norm does."""
    statistic.sums += np.concatenate([[len(x)], x.sum(axis=0), (x * x).sum(axis=0)])


def test_they_begin_with_mean_zero_and_variance_one():
    _, running = make((2, 0.1), (1, 0.1))
    state = running.state()
    assert list(state) == [f"bn{i}.running_{what}" for i in (0, 1) for what in ("mean", "variance")]
    np.testing.assert_array_equal(state["bn0.running_mean"], [0, 0])
    np.testing.assert_array_equal(state["bn1.running_variance"], [1])


def test_each_layer_moves_by_its_own_momentum():
    rng = np.random.default_rng(0)
    statistics, running = make((3, 0.5), (2, 0.1))
    data = [rng.normal(2, 3, size=(20, s.channels)) for s in statistics]
    for s, x in zip(statistics, data, strict=True):
        see(s, x)
    running.fold()
    for s, x in zip(statistics, data, strict=True):
        m = s.momentum
        np.testing.assert_allclose(s.mean, m * x.mean(axis=0), rtol=1e-12)
        variance = 1 - m + m * x.var(axis=0, ddof=1)
        np.testing.assert_allclose(s.variance, variance, rtol=1e-12)


def test_a_single_row_has_no_variance_but_no_nan_either():
    (statistic,), running = make((1, 0.5))
    see(statistic, np.array([[3.0]]))
    running.fold()
    np.testing.assert_array_equal([statistic.mean[0], statistic.variance[0]], [1.5, 0.5])


def test_a_model_without_batch_norm_has_none():
    _, running = make()
    running.fold()
    assert running.state() == {}


def test_a_total_is_added_once_for_all_shards_of_a_micro_batch():
    (statistic,), _ = make((1, 0.1))
    total = np.ones(3)
    for array in (total, total[:], np.full(3, 2.0)):  # shards, then another micro-batch
        statistic.add_total("bn0", array)
    np.testing.assert_array_equal(statistic.sums, 3)
    statistic.begin_step()
    statistic.add_total("bn0", total)
    np.testing.assert_array_equal(statistic.sums, 4)
