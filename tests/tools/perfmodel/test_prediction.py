import json
from dataclasses import replace

import pytest

from pydtnn.comm import run_threads
from pydtnn.tools.perfmodel import ComputeCosts
from pydtnn.tools.perfmodel.compute.measured import measure_job
from pydtnn.tools.perfmodel.compute.profile import MeasuredCosts
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.tools.perfmodel.prediction import Prediction
from pydtnn.tools.perfmodel.virtual.steps import predict
from pydtnn.training.workload import Workload
from tests.tools.perfmodel.small import small_work

PASS = 1e-3
"""Time of a pass of a layer, in s."""


class Constant(ComputeCosts):
    """Every pass of a layer takes the same time, phases none."""

    def seconds(self, label, layer, batch):
        return PASS if label.kind != "phase" and label.index == 0 else 0.0


def platform(name: str = "cpu-1gbit", ranks: int = 1, **between: float) -> Platform:
    found = Platform.load(name)
    messages = replace(found.messages, between=replace(found.messages.between, **between))
    return replace(found, cluster=replace(found.cluster, ranks_per_host=ranks), messages=messages)


def predicted(between: dict[str, float] | None = None, **options: object) -> Prediction:
    return predict(small_work(**options), platform(**(between or {})), Constant())


def test_the_parts_of_a_step_add_up_and_one_rank_has_no_communication():
    prediction = predicted()
    (rank,) = prediction.ranks
    assert rank.step.exposed == rank.step.idle == 0.0
    assert rank.step.seconds == pytest.approx(rank.step.compute)
    assert rank.step.compute == pytest.approx(PASS * round(rank.step.compute / PASS))
    assert prediction.bottleneck.startswith("compute (")
    only = replace(rank.step, layers=rank.step.layers[:1])
    alone = replace(prediction, ranks=(replace(rank, step=only),))
    assert alone.bottleneck == f"compute ({only.layers[0].name} 100 %)"
    assert prediction.deciles == (1.0, 1.0)
    (rank,) = predicted(recompute=2).ranks
    assert rank.step.recomputed > 0
    for one in (rank, *predicted(axes={"data": 2}).ranks):
        parts = one.step.parts().values()
        assert sum(parts) == pytest.approx(one.step.seconds)
        assert min(parts) >= 0
    assert one.step.exposed > 0


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "options",
    [
        {"axes": {"data": 4}, "scheme": "sharded"},
        {"axes": {"data": 2}, "scheme": "local_sgd", "scheme_options": {"period": 3}},
        {"axes": {"data": 2}, "compress": "power_sgd"},
        {"axes": {"pipeline": 2}},
        {"axes": {"data": 2, "spatial": 2}},
    ],
)
def test_a_faster_network_is_never_slower_and_an_infinitely_fast_one_has_the_time_of_compute(
    options,
):
    slow, fast = (
        predicted({"bandwidth": rate, "shared": rate, "latency": latency}, **options)
        for rate, latency in ((1e7, 1e-3), (1e12, 1e-9))
    )
    assert fast.seconds < slow.seconds
    if "pipeline" not in options.get("axes", {}):  # whose stages wait for each other
        step = fast.ranks[0].step
        assert step.seconds == pytest.approx(step.compute, rel=0.05)


def test_a_slow_loader_makes_the_step_longer():
    found = platform()
    slow = replace(found, storage=replace(found.storage, sample=1.0))
    prediction = predict(small_work(4), slow, Constant())
    assert prediction.seconds == pytest.approx(4.0, rel=0.01)
    assert prediction.bottleneck == "loader"
    waits = predict(small_work(4, loader_threads=0), slow, Constant())
    assert waits.loader == pytest.approx(4.0, rel=0.01)


def test_a_prediction_with_measured_costs_is_readable_and_json():
    work = small_work(axes={"filter": 2})
    profile = run_threads(2, lambda comm: measure_job(work, comm, steps=2))[0]
    prediction = predict(work, platform(), [MeasuredCosts(own) for own in profile.ranks])
    text = str(prediction)
    assert text.startswith("small_net, filter 2, batch 8, on cpu-1gbit: ")
    assert len(text.splitlines()) >= 5
    content = json.loads(json.dumps(prediction.to_json()))
    assert content["seconds"] == prediction.seconds
    names = {layer["name"] for layer in content["ranks"][0]["layers"]}
    assert names >= {"conv1", "conv2", "head"}


def test_more_ranks_than_can_be_executed_are_an_error():
    with pytest.raises(ValueError, match="predict: expected at most 16 ranks, or so many kinds"):
        predicted(batch=32, axes={"filter": 32})


def test_parameters_are_updated_once_whatever_the_number_of_buckets():
    few, many = (
        predict(small_work(bucket_bytes=size, axes={"data": 2}), platform()).ranks[0].step.update
        for size in (1 << 20, 512)
    )
    assert many == pytest.approx(few, rel=1e-3)  # gaps between buckets
    assert few > 0


def test_sums_that_are_pending_at_a_time_need_memory():
    overlapped, after = (
        predicted(
            {"bandwidth": 2e5, "shared": 2e5},
            axes={"data": 2},
            allreduce="vendor",
            overlap=overlap,
            bucket_bytes=512,
        ).ranks[0]
        for overlap in (True, False)
    )
    assert overlapped.memory.messages > after.memory.messages > 0
    assert overlapped.memory.messages <= 1.1 * overlapped.memory.gradients
    assert overlapped.step.seconds < after.step.seconds


def test_a_model_is_predicted_with_the_options_of_a_workload_on_a_platform_by_name():
    options = {"input_shape": (6, 6, 1), "batch": 4, "axes": {"data": 2}}
    short = predict("mlp", "cpu-1gbit", Constant(), **options)
    assert short.seconds == predict(Workload("mlp", **options), platform(), Constant()).seconds
    with pytest.raises(TypeError, match="expected options as arguments of the Workload, got batch"):
        predict(small_work(), platform(), Constant(), batch=8)


def test_parts_that_are_released_need_no_memory():
    def memory(scheme, **more):
        options = {"axes": {"data": 2}, "bucket_bytes": 1, **more}
        return predicted(scheme=scheme, **options).ranks[0].memory

    whole, grads, values = map(memory, ("sharded", "sharded_gradients", "sharded_parameters"))
    assert 0.5 * whole.gradients < grads.gradients == values.gradients < 0.95 * whole.gradients
    assert grads.parameters == whole.parameters
    assert values.gradients < values.parameters < whole.parameters
    twice = memory("sharded_parameters", accumulation=2)  # gradients are whole until the second
    assert (twice.gradients, twice.parameters) == (whole.gradients, values.parameters)
    whole, values = (memory(s, dtype="bfloat16") for s in ("sharded", "sharded_parameters"))
    assert 0.5 < values.parameters / whole.parameters < twice.parameters / twice.gradients


def test_values_between_the_halves_of_backward_need_memory():
    """In the last stage, those of two micro-batches, with gradients of outputs."""

    def activations(schedule):
        options = {"width": 16, "depth": 2, "heads": 2, "tied": False}
        gpt = Workload("gpt", (32,), 11, batch=8, model_options=options, axes={"pipeline": 2})
        work = replace(gpt, micro_batches=4, pipeline_schedule=schedule)
        return [one.memory.activations for one in predict(work, platform(), Constant()).ranks]

    (first, last), (eager, late) = activations("zb_h1"), activations("1f1b")
    assert last > 1.5 * late
    assert last > first >= eager
