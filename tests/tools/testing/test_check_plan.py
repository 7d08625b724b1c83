"""`check_plan` accepts plans that compute what serial training does, and names the layer if not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pydtnn.comm.communicator import communicator_of_thread
from pydtnn.layers import BatchNorm, Conv2d, Flatten, Layer, Linear, MaxPool2d, ReLU
from pydtnn.layers.collectives import AllGather, AllReduce, Pending, Steps
from pydtnn.layers.parameters import ParameterPart
from pydtnn.layers.statistics import RunningStatistics
from pydtnn.model.partition import rules
from pydtnn.model.partition.striped_conv import StripedConv2d
from pydtnn.parallel import exchange
from pydtnn.tools.testing import check_plan, trajectory
from pydtnn.tools.testing.__main__ import main
from pydtnn.training.trainer import Trainer
from pydtnn.utils.request import Completed
from tests.each import each
from tests.small_run import only_line


def layers() -> list[Layer]:
    return [
        Conv2d(4, 3, padding=1, name="first"),
        BatchNorm(name="norm"),
        ReLU(),
        MaxPool2d(3, 1, padding=1, name="pool"),
        Conv2d(4, 3, stride=2, padding=1, name="second"),
        ReLU(),
        Flatten(),
        Linear(3, name="last"),
    ]


def test_the_report_is_a_table_without_default_meshes_that_are_not_possible():
    net = [Conv2d(2, 1), Flatten(), Linear(2)]
    report = check_plan(net, (2, 3, 2), {"*": {"filter": "model"}})
    possible = [row for row in report.rows if not row.refused]
    assert [row.mesh for row in possible] == [{"model": 2}, {"data": 2, "model": 2}]
    assert all(max(row.differences.values()) < 1e-13 for row in possible)
    title, head, line, *_ = str(report).splitlines()
    assert title.startswith("plan: 32 parameters, 3 steps of 5 samples")
    assert len(head) == len(line)
    assert "at least the 3 ranks, got 2" in str(report)
    with pytest.raises(ValueError, match="filters must be at least the 3 ranks, got 2"):
        check_plan(net, (2, 3, 2), {"*": {"filter": "model"}}, meshes=[{"model": 3}])


# -- broken layers and passes: each is refused with the layer's name

SPATIAL, FILTER, CHANNEL = {"spatial": 2}, {"filter": 2}, {"channel": 2}
Patch = pytest.MonkeyPatch
BROKEN: list[tuple[Callable[[Patch], None], str, dict[str, int], str]] = []


def breaks(
    plan: str, mesh: dict[str, int], words: str
) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """What is said of the fault below, under a plan on a mesh."""

    def note(fault: Callable[[Patch], None]) -> Callable[[Patch], None]:
        BROKEN.append((fault, plan, mesh, words))
        return fault

    return note


@breaks("spatial", SPATIAL, "second: the gradient of the input, which is the output of pool,")
def a_halo_missing_in_backward(patch: Patch) -> None:
    right = StripedConv2d.gated_steps

    def wrong(*args: Any) -> Steps:
        steps = right(*args)
        pending = yield next(steps)
        received = [0 * array for array in pending.wait()]
        try:
            steps.send(Pending(None, lambda: received))
        except StopIteration as end:
            return end.value

    patch.setattr(StripedConv2d, "gated_steps", wrong)


@breaks("spatial", SPATIAL, "second: the output is the first that differs")
def rows_that_are_off_by_one(patch: Patch) -> None:
    right = rules.window_rows

    def wrong(outputs: Any, size: int, kernel: int, stride: int, *rest: int) -> Any:
        (start, stop), around = right(outputs, size, kernel, stride, *rest)
        if stride == 2 and start > 0:
            return (start - 1, stop - 1), around
        return (start, stop), around

    patch.setattr(rules, "window_rows", wrong)


@breaks(
    "spatial", {"data": 2, **SPATIAL}, r"the gradient \S+ of rank \d differs from that of serial"
)
def gradients_that_are_not_reduced_over_the_data_axis(patch: Patch) -> None:
    patch.setattr(exchange.AllReduce, "start_sum", lambda self, bucket: Completed())


@breaks("filter", FILTER, r"norm: the statistic norm\.running_mean of rank \d differs")
def statistics_of_other_channels(patch: Patch) -> None:
    right = RunningStatistics.fold

    def wrong(self: Any) -> None:
        right(self)
        if self.statistics[0].part is not None:
            self.statistics[0].mean[:] = self.statistics[0].mean[::-1].copy()

    patch.setattr(RunningStatistics, "fold", wrong)


@breaks("filter", FILTER, r"first: the initial value first\.w of rank \d differs")
def initial_values_of_other_filters(patch: Patch) -> None:
    right = ParameterPart.take

    def wrong(self: Any, whole: Any, position: Any) -> Any:
        return right(self, whole[::-1] if whole.ndim == 4 else whole, position)

    patch.setattr(ParameterPart, "take", wrong)


@breaks("filter", FILTER, r"wait for each other: .*rank 1 at pool/channels-partial")
def a_message_that_is_not_sent(patch: Patch) -> None:
    right = AllGather.start

    def wrong(self: Any, group: Any, tag: int) -> Any:
        if group.rank == 0:
            shape = [*self.array.shape]
            shape[self.dim] = self.bounds[-1]
            return Pending(None, lambda: np.zeros(shape))
        return right(self, group, tag)

    patch.setattr(AllGather, "start", wrong)


@breaks("filter", FILTER, r"the send of 3 float64 to rank 1 .* has no counterpart")
def a_message_that_is_not_received(patch: Patch) -> None:
    right = AllGather.start

    def wrong(self: Any, group: Any, tag: int) -> Any:
        if group.rank == 0:
            group.isend(np.zeros(3), 1, 99)
        return right(self, group, tag)

    patch.setattr(AllGather, "start", wrong)


@breaks("channel", {"channel": 3}, r"the output output 0 of rank \d differs from that of rank 0")
def outputs_that_are_rounded_in_another_way(patch: Patch) -> None:
    right = AllReduce.start

    def wrong(self: Any, group: Any, tag: int) -> Any:
        whole = right(self, group, tag).wait()
        return Pending(None, lambda: np.nextafter(whole, np.inf) if group.rank else whole)

    patch.setattr(AllReduce, "start", wrong)


@breaks(
    "filter",
    {"data": 2, **FILTER},
    r"norm\.running_mean of rank \d differs from that of rank \d",
)
def statistics_that_are_summed_in_the_order_of_each_rank(patch: Patch) -> None:
    right = RunningStatistics.fold

    def wrong(self: Any) -> None:
        right(self)
        rank = communicator_of_thread()
        if rank is not None and rank.rank > 0:  # as a sum that is rounded in another way
            self.statistics[0].mean[:] = np.nextafter(self.statistics[0].mean, np.inf)

    patch.setattr(RunningStatistics, "fold", wrong)


@each(("fault", "plan", "mesh", "words"), BROKEN)
def test_a_fault_is_refused_with_the_name_of_the_layer(fault, plan, mesh, words, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=words) as caught:
        check_plan(layers(), (5, 7, 2), plan, meshes=[mesh])
    told = str(caught.value)
    assert "\n" not in told
    assert "[mesh " in told


def scaled(*args: Any, **options: Any) -> Trainer:
    """A trainer whose gradients are of another scale, on meshes."""
    trainer = Trainer(*args, **options)
    if options["mesh"] is not None:
        right = trainer.exchange.loss_scale
        trainer.exchange.loss_scale = lambda *args: 1.001 * right(*args)  # type: ignore[method-assign]
    return trainer


@each(("plan", "mesh"), [(None, {"data": 2}), ("pipeline", {"data": 2, "pipeline": 2})])
def test_a_gradient_of_another_scale_is_that_of_the_trainer(plan, mesh, monkeypatch):
    net = [Conv2d(4, 3, padding=1), BatchNorm(), ReLU(), Flatten(), Linear(3, name="last")]
    assert check_plan(net, (5, 4, 2), plan, meshes=[mesh]).rows[0].differences["gradient"] < 1e-13
    monkeypatch.setattr(trajectory, "Trainer", scaled)
    layer = "trainer: the gradient of the loss at the output of last" if plan is None else "flatten"
    words = f"{layer}.* differs .*, by 1.0e-03; "
    with pytest.raises(AssertionError, match=words):
        check_plan(net, (5, 4, 2), plan, meshes=[mesh])


# -- the command


def network() -> list[Layer]:
    return [Conv2d(4, 3, padding=1, name="first"), ReLU(), Flatten(), Linear(3, name="last")]


def test_the_command_prints_the_report(capsys):
    arguments = [f"{__file__}:network", "--shape=5,7,2", "--plan=spatial", "--mesh=spatial=2"]
    assert main(arguments) == 0
    printed, told = capsys.readouterr()
    assert told == ""
    assert printed.startswith("spatial: 499 parameters")
    assert printed.splitlines()[2].startswith("spatial=2")


@each(
    ("arguments", "words"),
    [
        ([f"{__file__}:network", "--mesh=spatial"], "--mesh must be axes with their ranks"),
        ([f"{__file__}:network", "--plan=spatal"], "unknown strategy 'spatal'; did you mean"),
        ([f"{__file__}:FILTER", "--plan=spatial"], "check_plan: expected a layer, a block"),
    ],
)
def test_the_command_fails_in_one_line(arguments, words, capsys):
    assert main([*arguments, "--shape=5,7,2"]) == 1
    printed, told = capsys.readouterr()
    assert printed == ""
    assert words in only_line(told)


@each(
    ("arguments", "words"),
    [
        ({"meshes": [{"filter": 0}]}, "filter must be at least 1, got 0"),
        ({"meshes": [{"filter": 65}]}, "ranks of a mesh to be at most 64, got"),
        ({"meshes": ["filter"]}, 'expected meshes such as {"filter": 2}'),
        ({}, "expected a plan or meshes, got neither"),
        ({"plan": "filter", "batch": 0}, "batch must be at least 1, got 0"),
        ({"plan": "filter", "tolerance": 0}, "tolerance must be above 0, got 0"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments, words):
    with pytest.raises((TypeError, ValueError), match=words):
        check_plan(network(), (5, 7, 2), **arguments)
