import pytest

from pydtnn.comm import run_threads
from pydtnn.tools.perfmodel.compute import ComputeCosts, Label
from pydtnn.tools.perfmodel.compute.measured import alike, measure, measure_job, profile_key
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.tools.perfmodel.virtual.steps import predict
from tests.each import each
from tests.tools.perfmodel.small import small_work


@each(
    "options",
    [
        {"axes": {"data": 2}, "compress": "top_k"},
        {"axes": {"data": 2}, "scheme": "sharded"},
        {"axes": {"filter": 2}},
        {"axes": {"pipeline": 2}, "micro_batches": 2},
    ],
)
def test_every_kind_of_plan_is_measured(options):
    work = small_work(**options)
    profile = measure(work, steps=2, warm_up=1)
    assert list(profile.ranks) == list(range(work.ranks))
    for rank in range(work.ranks):
        seconds = profile.of(rank).median()
        assert all(value >= 0 for value in seconds.values())
        assert sum(seconds.values()) > 0
        assert Label("phase", "loss", 0) in seconds


def test_every_layer_is_measured_with_the_segments_around_its_messages():
    serial = {label for label in measure(small_work(), steps=1).of(0).median()}
    cut = {label for label in measure(small_work(axes={"spatial": 2}), steps=1).of(0).median()}
    for kind in ("forward", "backward"):
        assert Label(kind, "conv2", 0) in serial
        assert Label(kind, "conv2", 1) not in serial
        assert Label(kind, "conv2", 1) in cut


def test_a_recomputed_pass_has_labels_of_its_own():
    labels = measure(small_work(recompute=2), steps=1).of(0).median()
    assert any(label.name.endswith(" (recomputed)") for label in labels)


def test_the_ranks_of_a_job_are_measured_at_the_same_time():
    work = small_work(axes={"data": 2})
    profiles = run_threads(2, lambda comm: measure_job(work, comm, steps=2, warm_up=1))
    assert profiles[0] == profiles[1]
    assert list(profiles[0].ranks) == [0, 1]
    assert len(profiles[0].of(1).steps) == 2


def test_ranks_that_compute_the_same_are_measured_once_and_a_profile_is_that_of_one_workload():
    assert alike(small_work(9, axes={"data": 8})) == (0,) + (1,) * 7
    assert alike(small_work(8, axes={"pipeline": 2, "data": 4})) == (0, 0, 0, 0, 4, 4, 4, 4)
    one, other = profile_key(small_work()), profile_key(small_work(axes={"filter": 2}))
    assert one == profile_key(small_work())
    assert one != other


@pytest.mark.long
def test_ranks_of_a_host_are_measured_by_processes_at_the_same_time():
    profile = measure(small_work(axes={"data": 2}), copies=2, steps=2)
    assert list(profile.ranks) == [0, 1]


@each("name", ["copies", "steps"])
def test_numbers_must_be_at_least_1(name):
    with pytest.raises(ValueError, match=f"measure: {name} must be at least 1"):
        measure(small_work(), **{name: 0})


class Noting(ComputeCosts):
    """Costs that note the passes of layers."""

    def __init__(self):
        self.labels = set()

    def seconds(self, label, layer, batch):
        if label.kind != "phase":
            self.labels.add(label)
        return 1e-3


def test_virtual_ranks_have_the_segments_that_are_measured():
    work = small_work(axes={"pipeline": 2}, micro_batches=4, pipeline_schedule="zb_h1")
    profile, costs = measure(work, steps=1), [Noting(), Noting()]
    predict(work, Platform.load("laptop"), costs)
    for rank, own in enumerate(costs):
        assert own.labels == {one for one in profile.of(rank).median() if one.kind != "phase"}
