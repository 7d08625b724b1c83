"""The expected time of runs whose hosts fail, against simulations of single runs."""

import random
from collections.abc import Callable
from math import ceil, exp

import pytest

from pydtnn.utils.failures import NoHostError, continued, optimal_interval, restarted
from tests.each import each


def one_run(
    rng: random.Random,
    work: float,
    hosts: int,
    mtbf: float,
    lost: float,
    speed: Callable[[int], float],
) -> tuple[float, int]:
    """Return time and failures of a run that continues without the hosts that fail."""
    seconds, pending, failures = 0.0, 0.0, 0
    while True:
        until = rng.expovariate(hosts / mtbf)
        needed = pending + work / speed(hosts)
        if needed <= until:
            return seconds + needed, failures
        work -= max(until - pending, 0.0) * speed(hosts)
        pending = max(pending - until, 0.0) + lost
        seconds, hosts, failures = seconds + until, hosts - 1, failures + 1


@each(
    ("work", "hosts", "mtbf", "lost", "speed"),
    [
        (1e4, 10, 1e6, 10.0, lambda n: n / 10),
        (3e5, 16, 2e6, 100.0, lambda n: 1 / (0.2 + 0.8 * 16 / n)),
        (2e5, 64, 3e6, 60.0, lambda n: 16 / ceil(1024 / n)),
    ],
)
def test_a_run_that_continues_takes_the_mean_of_simulated_ones(work, hosts, mtbf, lost, speed):
    rng = random.Random(0)
    runs = [one_run(rng, work, hosts, mtbf, lost, speed) for _ in range(4000)]
    found = continued(work, hosts, mtbf, lost, speed)
    assert found.seconds == pytest.approx(sum(s for s, _ in runs) / 4000, rel=0.02)
    assert found.failures == pytest.approx(sum(n for _, n in runs) / 4000, rel=0.08)
    assert found.failures == pytest.approx(hosts * (1 - exp(-found.seconds / mtbf)))


def test_without_failures_nothing_is_lost_and_without_hosts_there_is_no_end():
    assert continued(100.0, 8, 1e9, 10.0, lambda n: n / 8).seconds == pytest.approx(100, rel=1e-4)
    interval = optimal_interval(1.0, 1e9)
    assert restarted(100.0, interval, 1.0, 60.0, 1e9).seconds == pytest.approx(100, rel=1e-4)
    for hosts in (1, 3):
        with pytest.raises(NoHostError, match=f"fewer than two of {hosts} hosts"):
            continued(1e9, hosts, 100.0, 1.0, lambda n: n / 3)


def test_a_run_that_is_restarted_takes_the_mean_of_simulated_ones():
    work, interval, cost, restart, mtbf = 2000.0, 100.0, 5.0, 10.0, 400.0
    rng = random.Random(0)

    def lasts(length: float) -> float:
        """Return the time until a part has been computed that failures begin again."""
        seconds, first = 0.0, True
        while True:
            needed = length if first else length + restart
            until = rng.expovariate(1 / mtbf)
            if until >= needed:
                return seconds + needed
            seconds, first = seconds + until, False

    mean = sum(sum(lasts(interval + cost) for _ in range(20)) for _ in range(2000)) / 2000
    assert restarted(work, interval, cost, restart, mtbf).seconds == pytest.approx(mean, rel=0.03)
