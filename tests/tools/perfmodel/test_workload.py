import pytest

from pydtnn.comm import Serial, run_threads
from pydtnn.tools.perfmodel.virtual.steps import predict
from pydtnn.tools.perfmodel.workload_rank import WorkloadRank, period
from pydtnn.training.workload import Workload
from tests.each import each
from tests.tools.perfmodel.small import small_work


def test_a_rank_trains_on_its_part_of_the_batch():
    def rank(comm):
        own = WorkloadRank(small_work(7, axes={"data": 2}), comm)
        before = own.trainer.optimizer.iterations
        own.step()
        return len(own.batch), own.trainer.optimizer.iterations - before

    assert run_threads(2, rank) == [(4, 1), (3, 1)]


def test_a_workload_needs_a_sample_for_each_rank():
    with pytest.raises(ValueError, match="one sample for each of 4 ranks along data, got a global"):
        predict(small_work(3, axes={"data": 4}), "cpu-1gbit")


def test_a_workload_is_for_a_number_of_ranks():
    with pytest.raises(ValueError, match="expected 2 ranks for small_net, data 2, got 1"):
        WorkloadRank(small_work(axes={"data": 2}), Serial())


def test_the_name_lists_what_differs_from_the_default():
    work = Workload("resnet20", (32, 32, 3), axes={"data": 2, "filter": 2}, compress="top_k")
    assert work.name == "resnet20, data 2 x filter 2, top_k"
    assert Workload("mlp", (4, 4, 1), recompute=2).name == "mlp, serial, recompute 2"


def test_the_period_is_that_of_the_scheme():
    assert period(small_work()) == 1
    assert period(small_work(scheme="local_sgd", scheme_options={"period": 3})) == 3


@each(("options", "in_flight"), [({}, 1), ({"axes": {"pipeline": 2}}, 2)])
def test_stages_keep_several_micro_batches(options, in_flight):
    work = small_work(8, **options)
    first, *_ = run_threads(work.ranks, lambda comm: WorkloadRank(work, comm).in_flight)
    assert first == in_flight
