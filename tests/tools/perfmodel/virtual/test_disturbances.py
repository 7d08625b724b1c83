"""Slow ranks and jitter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.tools.perfmodel.virtual import VirtualRun, run_virtual
from pydtnn.tools.perfmodel.virtual.disturbances import DISTRIBUTIONS, Disturbances, Jitter
from tests.each import each
from tests.tools.perfmodel.virtual.costs import UniformCosts, cluster
from tests.tools.perfmodel.virtual.test_run import train

FILE = """
stragglers:
  - {rank: 1, factor: 3, begin: 1 s, end: 2 s}
jitter:
  - {spread: 0.2, distribution: uniform, seed: 3}
"""


def load(text: str, tmp_path: Path) -> Disturbances:
    path = tmp_path / "disturb.yaml"
    path.write_text(text)
    return Disturbances.load(path)


def disturbed(function: Any, disturbances: Disturbances) -> VirtualRun:
    network = cluster([0, 1])  # type: ignore[arg-type]
    return run_virtual(function, network=network, costs=UniformCosts(), disturbances=disturbances)


def test_a_file_is_read(tmp_path):
    found = load(FILE, tmp_path)
    assert (found.stragglers[0].rank, found.stragglers[0].factor) == (1, 3)
    assert (found.jitter[0].distribution, found.jitter[0].seed) == ("uniform", 3)
    assert (found.stragglers[0].begin, found.stragglers[0].end) == (1, 2)


@each(
    ("text", "told"),
    [
        ("stragglers: [{rank: 1}]", "expected an entry 'stragglers\\[0\\].factor', got none"),
        ("stragglers: [{rank: 1, factor: 2, begin: 2 s, end: 2 s}]", "expected an end after the"),
        ("jitter: [{spread: 0.1, distribution: gamma}]", "'gamma'"),
        ("slow_links: []", "'slow_links'"),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_a_sentence(text, told, tmp_path):
    with pytest.raises(ValueError, match=told):
        load(text, tmp_path)


def test_ranks_that_do_not_exist_are_refused(tmp_path):
    with pytest.raises(ValueError, match="disturb.yaml: expected a rank from 0 to 1"):
        disturbed(lambda comm: None, load("stragglers: [{rank: 2, factor: 2}]", tmp_path))


def test_a_slow_rank_delays_training_and_changes_no_byte(tmp_path):
    usual = disturbed(train, Disturbances())
    slow = disturbed(train, load("stragglers: [{rank: 1, factor: 3}]", tmp_path))
    assert slow.results[0][0] == usual.results[0][0]
    assert 2.5 < slow.results[0][1] / usual.results[0][1] < 3.1
    later = disturbed(train, load("stragglers: [{rank: 1, factor: 3, begin: 99 s}]", tmp_path))
    assert later.seconds == usual.seconds


def test_jitter_is_the_same_in_every_run_and_has_another_seed(tmp_path):
    first, again, other = (
        disturbed(train, load(f"jitter: [{{spread: 0.3, seed: {seed}}}]", tmp_path)).seconds
        for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other


@each("distribution", DISTRIBUTIONS)
def test_jitter_has_mean_1_and_its_spread(distribution):
    factors = Jitter(0.2, distribution).factors(0, np.arange(20_000))
    assert factors.mean() == pytest.approx(1, abs=0.01)
    assert factors.std() == pytest.approx(0.2, abs=0.01)
    assert factors.min() >= 0
    assert Jitter(0.2, distribution).factors(1, np.arange(20_000))[0] != factors[0]
