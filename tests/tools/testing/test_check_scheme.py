"""`check_scheme` accepts the schemes that keep the contract, and says what the others break."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pydtnn.layers.parameters import Bucket
from pydtnn.optimizers import SGD, AdamW
from pydtnn.parallel.exchange import AllReduce, GradientExchange
from pydtnn.parallel.schemes import SCHEMES
from pydtnn.tools.testing import check_scheme, scheme
from pydtnn.tools.testing.__main__ import main
from tests.each import each
from tests.parallel.schemes.course import CASES, OF_ANY_RULE
from tests.small_run import only_line


class Plain(GradientExchange):
    """A correct scheme without overlap; the broken ones below differ in one thing."""

    equal = sums_gradients = True

    def update(self, optimizer: Any) -> None:
        optimizer.step(self.wait)

    def wait(self, bucket: Bucket) -> None:
        self.comm.allreduce(bucket.grads)


class LocalSGD(GradientExchange):
    period = 4

    def loss_scale(self, local: int, total: int) -> float:
        return 1 / max(local, 1)

    def update(self, optimizer: Any) -> None:
        optimizer.step()
        if optimizer.iterations % self.period == 0:
            self.average_parameters()


class LocalSGD1(LocalSGD):
    period = 1


@pytest.fixture
def results_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the checks of delays, checkpoints and errors."""
    monkeypatch.setattr(scheme, "CHECKS", (scheme.check_buckets,))


@pytest.mark.usefixtures("results_only")
def test_a_scheme_that_promises_less_must_lower_the_loss():
    report = check_scheme(LocalSGD, ranks=[3])
    (row,) = report.rows
    assert not row.always_equal
    assert row.difference > 1e-3
    assert row.loss < report.first_loss
    # It can be asked for more than it promises.
    (row,) = check_scheme(LocalSGD1, ranks=[2], equal_to_serial=True).rows
    assert row.difference < 1e-12
    with pytest.raises(AssertionError, match="differs from that of serial training at the end"):
        check_scheme(LocalSGD, ranks=[2], equal_to_serial=True)


OPTIONS_OF = {name for name, options in CASES if options}
"""Schemes that tests/parallel/schemes/test_schemes.py checks with options of their own."""


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in SCHEMES if name not in OPTIONS_OF])
def test_the_library_s_schemes_pass(name):
    options: dict[str, Any] = {"equal_to_serial": False} if name == "stale" else {}
    if name not in OF_ANY_RULE:
        options["optimizer"] = lambda: AdamW(0.02)
    check_scheme(SCHEMES[name], ranks=[1, 3 if options else 11], **options)


@pytest.mark.usefixtures("results_only")
def test_the_report_counts_messages_and_bytes():
    report = check_scheme(AllReduce, ranks=[1, 3], optimizer=lambda: SGD(1e-3))
    alone, three = report.rows
    assert all(row.always_equal and row.difference < 1e-12 for row in report.rows)
    assert report.scheme == "AllReduce"
    assert report.buckets == 4
    assert report.serial_loss > 0.95 * report.first_loss  # by the rule that was chosen
    assert (alone.messages, alone.bytes, alone.least_bytes) == (4, 0, 0)
    assert (three.messages, three.least_bytes) == (4, 768)
    assert abs(three.bytes - three.least_bytes) < report.buckets  # each is rounded
    title, _, _, *lines = str(report).splitlines()
    assert title.startswith("AllReduce: 57 parameters in 4 buckets")
    assert [line.split()[0] for line in lines] == ["1", "3"]


def test_a_reference_that_differs_is_refused():
    def unchanged(start: np.ndarray, steps: Any) -> Any:
        yield from (start for _ in steps)

    with pytest.raises(AssertionError, match="differ from those of the reference after step 1"):
        check_scheme(AllReduce, ranks=[2], reference=unchanged)


# -- broken schemes

Scheme = type[GradientExchange]
BROKEN: list[tuple[Scheme, int, str]] = []


def breaks(ranks: int, sentence: str) -> Callable[[Scheme], Scheme]:
    """What is said of the scheme below, on so many ranks."""

    def note(scheme: Scheme) -> Scheme:
        BROKEN.append((scheme, ranks, sentence))
        return scheme

    return note


@breaks(2, r"parameter first\.\w of rank 1 differs from that of rank 0 after step 1, by \d\.\d")
class ForgetsABucket(Plain):
    def wait(self, bucket: Bucket) -> None:
        if bucket.index != 2:
            super().wait(bucket)


@breaks(3, r"\S+ of rank 0 differs from that of serial training after step 1, by \d\.\de-\d+")
class DividesBySize(Plain):
    def wait(self, bucket: Bucket) -> None:
        super().wait(bucket)
        bucket.grads[...] /= self.comm.size


@breaks(2, r"not finished after 1 s \(rank 0 at \w+ in recv of 1 float64 from rank 0 \(tag 0\)")
class WaitsForItself(Plain):
    """Polls for a message that never comes."""

    def update(self, optimizer: Any) -> None:
        request = self.comm.irecv(np.empty(1), self.comm.rank)
        while not request.test():
            pass


@breaks(2, r"the send of 5 float64 to rank 0 \(tag 7\) of rank 1 has no")
class LeavesAMessage(Plain):
    def update(self, optimizer: Any) -> None:
        super().update(optimizer)
        if self.comm.rank == 1 and optimizer.iterations == 3:
            self.comm.isend(np.ones(5), 0, tag=7)


@breaks(3, r"the iallreduce of 5 float64 of rank 0 is not complete at")
class LeavesARequest(Plain):
    def update(self, optimizer: Any) -> None:
        super().update(optimizer)
        if optimizer.iterations == 3:
            self.comm.iallreduce(np.ones(5))


@breaks(2, r"with step 5 abandoned: rank \d: the scheme leaves iallreduce of")
class KeepsRequests(AllReduce):
    """Keeps its requests to itself."""

    def bucket_ready(self, bucket: Bucket) -> None:
        self.requests = {**getattr(self, "requests", {}), bucket.index: self.start_sum(bucket)}

    def wait(self, bucket: Bucket) -> None:
        self.requests.pop(bucket.index).wait()


@breaks(2, r"resumed after step 11: the parameter \S+ of rank 0 differs .* step 12, by")
class ForgetsItsMomentum(Plain):
    """Smooths the sums of gradients by itself, and keeps that to itself."""

    sums_gradients = False

    def start(self, buckets: tuple[Bucket, ...]) -> None:
        super().start(buckets)
        self.smooth = [np.zeros_like(bucket.grads) for bucket in buckets]

    def wait(self, bucket: Bucket) -> None:
        super().wait(bucket)
        self.smooth[bucket.index] += 0.5 * (bucket.grads - self.smooth[bucket.index])
        bucket.grads[...] = self.smooth[bucket.index]


@breaks(1, r"saved after step 11: the parameter \S+ of rank 0 differs .* after step 12")
class ChangesWhenSaved(AllReduce):
    def state(self) -> dict[str, Any]:
        for bucket in self.buckets:
            bucket.values[...] *= 1.01
        return super().state()


@breaks(1, r"saved after step 11: .*state: values must be arrays or values")
class StateWithoutWords(AllReduce):
    def state(self) -> dict[str, Any]:
        return {"buckets": self.buckets}


@breaks(3, r"random delays \(seed \d\): .* depends on which rank comes first")
class TakesWhatHasArrived(GradientExchange):
    """Averages with the neighbour's parameters if they happen to be there."""

    def loss_scale(self, local: int, total: int) -> float:
        return 1 / max(local, 1)

    def update(self, optimizer: Any) -> None:
        size, rank = self.comm.size, self.comm.rank
        for bucket in self.buckets:
            theirs = np.empty_like(bucket.values)
            requests = [self.comm.irecv(theirs, (rank - 1) % size)]
            requests.append(self.comm.isend(bucket.values.copy(), (rank + 1) % size))
            late = not requests[0].test()
            for request in requests:
                request.wait()
            if not late:
                bucket.values[...] = (bucket.values + theirs) / 2
        optimizer.step()


@breaks(2, r"uses an array of iallreduce of \d+ float64, which is not complete")
class NeverWaits(AllReduce):
    def wait(self, bucket: Bucket) -> None:
        pass


@breaks(2, r"the loss is not finite at .*; here arrays hold NaN until their req")
class ReadsTooEarly(AllReduce):
    def update(self, optimizer: Any) -> None:
        optimizer.step()
        for bucket in self.buckets:
            self.wait(bucket)


@breaks(2, r"18 steps reduce the loss from .* to .*, serial training to")
class ClimbsTheHill(LocalSGD):
    def loss_scale(self, local: int, total: int) -> float:
        return -0.1 / max(local, 1)


@breaks(2, r"rank 1 raises in allreduce of .*, but")
class HidesErrors(Plain):
    """Falls back to its own gradients when anything goes wrong."""

    def wait(self, bucket: Bucket) -> None:
        with contextlib.suppress(RuntimeError):
            super().wait(bucket)


@breaks(1, r"rank 0: AttributeError: '\w+' object has no attribute 'all_reduce'")
class HasNoMethod(Plain):
    def wait(self, bucket: Bucket) -> None:
        self.comm.all_reduce(bucket.grads)  # type: ignore[attr-defined]


WAITS = pytest.mark.measure  # for a second: the training before must take less


@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("broken", "ranks", "sentence"),
    [
        pytest.param(*case, id=case[0].__name__, marks=[WAITS] * (case[0] is WaitsForItself))
        for case in BROKEN
    ],
)
def test_a_broken_scheme_is_told_what_it_breaks(broken, ranks, sentence):
    with pytest.raises(AssertionError, match=sentence) as caught:
        check_scheme(broken, ranks=[ranks], timeout=1 if broken is WaitsForItself else 60)
    told = str(caught.value)
    assert told.startswith(f"{broken.__name__} on {ranks} rank")
    assert "\n" not in told


def test_what_cannot_be_checked_is_refused():
    for ranks in ([], [0], [12]):
        with pytest.raises(ValueError, match="ranks must be numbers from 1 to 11"):
            check_scheme(AllReduce, ranks=ranks)
    with pytest.raises(TypeError, match="must make a GradientExchange, got 3; inherit from it"):
        check_scheme(lambda comm: 3)  # type: ignore[arg-type,return-value]


@each(
    ("arguments", "status", "words"),
    [
        ([f"{__file__}:Plain", "--ranks=1,2"], 0, r"^Plain: 57 parameters(.|\n)*\n +1 .*\n +2 "),
        (["allreduce", '--scheme-options={"overlap": false}', "--equal-to-serial"], 0, "AllRed"),
        ([f"{__file__}:DividesBySize"], 1, "DividesBySize on 2 ranks: the parameter "),
        (["allreduse"], 1, r"^unknown scheme 'allreduse'; did you mean 'allreduce'\?$"),
    ],
)
def test_the_command_prints_the_report_or_fails_in_one_line(arguments, status, words, capsys):
    name, *options = arguments
    assert main([name, "--ranks=2", *options]) == status
    printed, told = capsys.readouterr()
    assert re.search(words, only_line(told) if status else printed)
    assert (printed, told)[1 - status] == ""
