from pydtnn.comm import run_threads
from pydtnn.tools.perfmodel.compute import ComputeCosts, Label
from pydtnn.tools.perfmodel.compute.measured import measure_job
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.tools.perfmodel.virtual.steps import predict
from tests.each import each
from tests.tools.perfmodel.small import small_work


def measure(work, steps=1):
    """Measure the ranks of a workload, which are threads."""
    found = run_threads(work.ranks, lambda comm: measure_job(work, comm, steps=steps, warm_up=1))
    assert all(one == found[0] for one in found)
    return found[0].ranks


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
    ranks = measure(work, steps=2)
    assert len(ranks) == work.ranks
    for own in ranks:
        assert len(own.steps) == 2
        assert min(map(min, own.times.values())) >= 0
        assert sum(map(sum, own.times.values())) > 0
        assert Label("phase", "loss", 0) in own.times


def test_every_layer_is_measured_with_the_segments_around_its_messages():
    serial = {*measure(small_work())[0].times}
    cut = {*measure(small_work(axes={"spatial": 2}))[0].times}
    for kind in ("forward", "backward"):
        assert Label(kind, "conv2", 0) in serial
        assert Label(kind, "conv2", 1) not in serial
        assert Label(kind, "conv2", 1) in cut


def test_a_recomputed_pass_has_labels_of_its_own():
    labels = measure(small_work(recompute=2))[0].times
    assert any(label.name.endswith(" (recomputed)") for label in labels)


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
    ranks, costs = measure(work), [Noting(), Noting()]
    predict(work, Platform.load("laptop"), costs)
    for rank, own in zip(ranks, costs, strict=True):
        assert own.labels == {one for one in rank.times if one.kind != "phase"}
