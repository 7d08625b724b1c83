"""A case draws the same networks again, alone and after other tests."""

from __future__ import annotations

import subprocess
import sys

from tests.random_cases import Cases
from tests.random_networks import for_each_network

ALONE = "import tests.test_random_networks as t, pydtnn.train; print(*t.drawn(3), sep='\\n')"


def drawn(case: int) -> list[str]:
    networks: list[str] = []
    cases = Cases("networks", "a test", seconds=0, only=case)
    for_each_network(cases, lambda case, network: networks.append(repr(network)))
    return networks


def test_a_case_draws_the_same_networks_whatever_has_been_imported():
    alone = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, check=True
    )
    assert drawn(3) == alone.stdout.splitlines()
    assert len(set(drawn(3))) > 5


def test_cases_draw_different_networks():
    assert set(drawn(3)) != set(drawn(4))
