from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from pydtnn import Model
from pydtnn.kernels import create_backend
from pydtnn.kernels.dry import dry_backend
from pydtnn.model.memory import DryMesh, _dry_copy, forecast_memory
from pydtnn.tools.perfmodel.dry_step import DryStep, inner_position
from pydtnn.tools.perfmodel.outline import BucketReady, Finish, NodeWork, Outline, Start
from pydtnn.training.workload import Workload
from tests.each import each

INPUT = (16, 16, 3)
BACKEND = create_backend("cpu")
WORK = Workload("resnet20", INPUT)


def outline(
    axes: dict[str, int] | None = None, recompute: int | None = None, stage: int = 0
) -> Outline:
    return DryStep(replace(WORK, axes=axes or {}), BACKEND, stage=stage).outline(recompute)


def dry_model(shape: dict[str, int], work: Workload = WORK) -> Model:
    place: Any = DryMesh(shape, inner_position(shape)) if shape else None
    model = Model(work.create_net(), work.input_shape, backend=BACKEND, mesh=place)
    model.cut_outputs = True
    return model


def nbytes(buckets: Iterable[Any]) -> int:
    return sum(bucket.nbytes for bucket in buckets)


@each("shape", [{}, {"spatial": 2}, {"filter": 2}, {"channel": 2}])
def test_an_outline_has_the_peak_and_the_buckets_of_the_model(shape):
    own, model = outline(shape), dry_model(shape)
    memory = own.memory
    for samples in (4, 32):
        peak = forecast_memory(model, samples).peak
        found = memory.peak.at(samples) + memory.values + memory.gradients + memory.copies
        assert found == pytest.approx(peak, rel=0.01)  # running statistics
    assert [b.nbytes for b in own.buckets] == [b.grads.nbytes for b in model.buckets]


def test_a_copy_that_computes_nothing_has_no_values():
    copy = _dry_copy(dry_model({}), dry_backend(BACKEND, 0))
    assert not any(p.value.any() or p.master.any() for p in copy.parameters.values())
    assert not any(bucket.values.any() for bucket in copy.buckets)


EXPERTS = Workload("moe_gpt_nano", (16,), 32)


@each(
    ("work", "shape"), [(WORK, {"filter": 2}), (EXPERTS, {"expert": 2}), (EXPERTS, {"context": 2})]
)
def test_an_outline_has_the_messages_that_the_forecast_counts(work, shape):
    own = DryStep(replace(work, axes=shape), BACKEND).outline()
    sent = forecast_memory(dry_model(shape, work), 8).sent
    starts = [e for e in (*own.forward, *own.backward) if isinstance(e, Start)]
    counted = sum(
        e.nbytes.at(8) if e.operation == "messages" else 2 * (2 - 1) / 2 * e.nbytes.at(8)
        for e in starts
    )
    assert counted == pytest.approx(sum(volume.nbytes for volume in sent.values()))
    groups = {bucket.group for bucket in own.buckets}  # those of experts are not summed
    assert "expert" not in shape or groups == {("data",), ("data", "expert")}


def test_stages_send_what_the_next_one_receives():
    both = (outline({"pipeline": 2}, stage=place) for place in (0, 1))
    ((received, sent),), ((other, none),) = (one.transfers for one in both)
    assert sent == other != ()
    assert received == none == ()


def test_stages_of_a_rank_have_their_own_events():
    work = replace(WORK, axes={"pipeline": 2}, pipeline_schedule="zb_v")
    own = DryStep(work, BACKEND, stage=0).outline()
    parts = [own.of_part(own.forward, part) for part in (0, 1)]
    assert [*parts[0], *parts[1]] == [*own.forward]
    assert [*own.of_part(own.backward, 1), *own.of_part(own.backward, 0)] == [*own.backward]
    assert len(own.transfers) == 2


def test_passes_read_the_buckets_of_their_layers():
    own = outline()
    last = len(own.buckets) - 1
    assert own.buckets[0].matrices[:2] == ((10, 64), (64, 576))  # of 64 filters of 3 x 3 x 64
    assert own.reads["stem.conv", 0] == ((last,), (last - 1,))
    assert own.reads["head.fc", 1].now == (0,)
    assert own.reads["head.fc", 0].ahead == own.reads["stem.conv", 1].ahead == ()


def test_buckets_are_shorter_between_hosts():
    step = DryStep(WORK, BACKEND)
    inside, between = (step.outline(between_hosts=several) for several in (False, True))
    assert nbytes(inside.buckets) == pytest.approx(nbytes(between.buckets), rel=0.01)
    assert len(between.buckets) > len(inside.buckets)
    assert between.buckets[0].nbytes < between.buckets[1].nbytes
    assert inside.forward is between.forward  # costs of their segments are computed once
    above = []
    for own in (inside, between):
        ready = [event.bucket for event in own.backward if isinstance(event, BucketReady)]
        assert ready == [*range(len(own.buckets))]
        memory = own.memory
        assert memory.gradients == nbytes(own.buckets)
        above.append(memory.peak.at(4))
    assert above[0] == above[1] > 0


def test_events_of_a_step_are_in_its_order():
    """Buckets become ready one after the other, and messages are awaited once."""
    own = outline()
    ready = [event.bucket for event in own.backward if isinstance(event, BucketReady)]
    assert ready == [*range(len(own.buckets))]
    assert all(isinstance(event, NodeWork | BucketReady) for event in (*own.forward, *own.backward))
    own = outline({"spatial": 2})
    for events in (own.forward, own.backward):
        started = [event.number for event in events if isinstance(event, Start)]
        assert started == [event.number for event in events if isinstance(event, Finish)] != []
    striped = [e.label for e in own.forward if isinstance(e, NodeWork)]
    name = next(label.name for label in striped if label.index == 2)
    assert [label.index for label in striped if label.name == name] == [0, 1, 2]
    with pytest.raises(ValueError, match="spatial=64"):
        outline({"spatial": 64})


def test_recomputation_keeps_less_and_cut_layers_have_fewer_parameters():
    plain, again = outline(), outline(recompute=3)
    names = [e.label.name for e in again.backward if isinstance(e, NodeWork)]
    assert any(name.endswith(" (recomputed)") for name in names)
    assert again.memory.peak.at(64) < plain.memory.peak.at(64)
    assert nbytes(outline({"filter": 4}).buckets) < 0.3 * nbytes(plain.buckets)
    assert outline({"pipeline": 2, "filter": 2}, stage=1).memory.kept(4) > 0
