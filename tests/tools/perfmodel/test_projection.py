from dataclasses import replace
from typing import Any

import pytest

from pydtnn.tools.perfmodel.compression import Compression, find_compression
from pydtnn.tools.perfmodel.compute import AnalyticCosts
from pydtnn.tools.perfmodel.messages import MessageCosts, duration
from pydtnn.tools.perfmodel.outline import Affine, BucketReady, Start
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.tools.perfmodel.prediction import Prediction
from pydtnn.tools.perfmodel.projection import Projector
from pydtnn.tools.perfmodel.timing import StepClock
from pydtnn.training.workload import SHARDED, Workload
from tests.each import each
from tests.tools.perfmodel.costs import PerFlop

INPUT = (16, 16, 3)


@pytest.fixture(scope="module")
def projector() -> Projector:
    work = Workload("resnet20", INPUT, batch=64, samples=1000)
    return Projector(work, Platform.load("cpu-10gbit"), PerFlop())


def project(projector: Projector, axes: dict[str, int] | None = None, **options: Any) -> Prediction:
    return projector.project(replace(projector.work, axes=axes or {}, **options))


def test_one_rank_does_not_communicate_and_several_are_cut_as_their_axes_say(projector):
    step = project(projector).step
    assert step.exposed == step.busy == step.idle == 0
    assert step.seconds == pytest.approx(step.compute)
    for axis in ("spatial", "filter", "channel"):
        cut = project(projector, {axis: 2})
        assert project(projector, {"data": 1, axis: 2}).seconds == cut.seconds
        own = cut.step
        assert own.forward + own.backward == pytest.approx(sum(x.compute for x in own.layers))
        assert own.layers_exposed == pytest.approx(sum(x.exchange for x in own.layers))


def test_low_rank_products_are_summed_and_take_the_time_of_their_accesses():
    found = find_compression("power_sgd", {"rank": 3}, bandwidth=4e9)
    assert found == Compression(adds=True, compress=10e-9, rank=3)


def test_a_rank_sends_to_both_neighbours_at_the_same_time(projector):
    costs = MessageCosts(projector.platform, replace(projector.work, axes={"spatial": 4}))

    def rounds(messages: int, nbytes: float, largest: float = 0.0) -> object:
        lengths = Affine(nbytes, 0.0), Affine(largest, 0.0)
        return costs.layer(Start(0, "pool", "neighbours", "spatial", *lengths, messages), 1)

    def expected(to_each: float, parts: float) -> object:
        return costs._rounds("neighbours", "spatial", to_each, parts)

    assert [rounds(1, 8e3), rounds(2, 16e3)] == [expected(8e3, 0.5), expected(8e3, 1)]
    assert [rounds(4, 16e3), rounds(2, 16e3, 12e3)] == [expected(8e3, 2), expected(12e3, 1)]


def test_recomputation_adds_forward_passes_and_saves_memory(projector):
    plain = project(projector, {"data": 2})
    again = project(projector, {"data": 2}, recompute="auto")
    assert plain.step.recomputed == 0 < again.step.recomputed < again.step.forward
    assert again.memory.activations < plain.memory.activations


def test_costs_of_layers_do_not_depend_on_what_was_outlined_before(projector):
    work = Workload("cnn", (28, 28, 1), batch=64, axes={"filter": 2, "channel": 3})
    own = Projector(work, platform := projector.platform, AnalyticCosts(platform))
    alone = own.project(work).seconds
    own.project(replace(work, recompute="auto"))
    assert own.on(platform).project(work).seconds == alone


def test_each_message_of_a_step_passes_the_links_once(projector):
    work = replace(projector.work, axes={"data": 2, "spatial": 2})
    costs, outline = MessageCosts(projector.platform, work), projector.tables(work).outline
    rounds = [*costs.losses]
    for bucket in outline.buckets:
        spatial = costs.allreduce("spatial", bucket.nbytes) if "spatial" in bucket.group else ()
        rounds += *spatial, *costs.along_data(bucket)
    for event in (*outline.forward, *outline.backward):
        if isinstance(event, Start):
            rounds += costs.layer(event, work.samples_per_rank)
    assert {axis for bucket in outline.buckets for axis in bucket.group} == {*work.axes}
    busy = sum(one.transfer for one in rounds)
    assert projector.project(work).step.busy == pytest.approx(busy)


def test_a_sharded_optimizer_stores_its_part_only(projector):
    plain, sharded = (project(projector, {"data": 4}, scheme=s) for s in ("allreduce", "sharded"))
    assert sharded.memory.slots == plain.memory.slots / 4
    assert sharded.step.update == plain.step.update / 4


def test_memory_beside_the_optimizer_depends_on_the_longest_bucket(projector):
    """A reduce-scatter takes two arrays and its result, an average one in which it is computed."""
    sharded = replace(projector.work, axes={"data": 4}, scheme="sharded")
    alone, four = (
        max(bucket.nbytes for bucket in projector.tables(work).outline.buckets)
        for work in (projector.work, sharded)
    )
    plain, averaged = (project(projector, ema=decay).memory for decay in (None, 0.9))
    assert averaged.messages - plain.messages == plain.slots + alone
    assert projector.project(sharded).memory.messages == 2.25 * four


def test_stages_send_activations_and_gradients_of_each_micro_batch(projector):
    """Two values of 8,192 B for each of 16 samples, forward and backward, four times."""
    step = project(projector, {"pipeline": 2}, micro_batches=4).step
    assert step.busy == pytest.approx(4 * 2 * (25e-6 + 2 * 8192 * 16 / 1.25e9))


def test_messages_to_all_ranks_begin_at_the_same_time(projector):
    """Two ranks of a host send two quarters each to the other host: the whole array."""
    cluster = replace(projector.platform.cluster, ranks_per_host=2)
    work = replace(projector.work, axes={"data": 4}, scheme="sharded_parameters")
    costs = MessageCosts(replace(projector.platform, cluster=cluster), work)
    bucket = projector.tables(work).outline.buckets[0]
    (one,) = costs.gather(bucket)
    assert (one.latency, one.transfer) == pytest.approx((25e-6, bucket.nbytes / 1.25e9))


def test_compression_sends_less(projector):
    plain, half = (project(projector, {"data": 2}, compress=c) for c in (None, "float16"))
    assert half.step.busy == pytest.approx(plain.step.busy / 2, rel=0.1)
    plain, half = (project(projector, {"data": 4}, compress=c) for c in (None, "float16"))
    assert half.step.busy == pytest.approx(plain.step.busy / 2, rel=0.1)
    assert project(projector, {"data": 4}, compress="power_sgd").step.busy < half.step.busy
    sent, served = (  # to all ranks, or to those that serve sums
        project(projector, {"data": 4}, compress="sign", compress_options={"served": served})
        for served in (False, True)
    )
    assert served.step.busy < sent.step.busy


def test_ranks_that_share_cores_compute_longer_by_the_same_factor(projector):
    platform, threads = projector.platform, projector.platform.compute.threads
    own, shared = (
        projector.with_platform(
            replace(
                platform, cluster=replace(platform.cluster, ranks_per_host=4, cores_per_host=cores)
            ),
            projector.costs,
        )
        for cores in (4 * threads, threads)
    )
    for axes in ({"data": 4}, {"spatial": 4}, {"pipeline": 4}):
        alone, crowded = (project(p, axes, recompute="auto").step for p in (own, shared))
        for part in ("forward", "backward", "recomputed", "other", "update"):
            assert getattr(crowded, part) == pytest.approx(4 * getattr(alone, part)), part
        assert crowded.backward > 0


@each("rank", [0, 1])
def test_sums_beside_the_backward_of_a_stage_take_less_than_after_it(projector, rank):
    work = replace(projector.work, axes={"data": 2, "pipeline": 2})
    costs, tables = MessageCosts(projector.platform, work), projector.tables(work, rank)
    alone, beside, after = (StepClock(tables, costs, 8) for _ in range(3))
    backward = alone.act("backward", 0, 8)
    within = beside.act("backward", 0, 8, last=True) - backward
    rounds = [one for bucket in tables.outline.buckets for one in costs.along_data(bucket)]
    assert 0 < within < sum(one.calls + one.processing(0.0) for one in rounds)
    after.act("backward", 0, 8)
    after.run(
        [e for e in tables.outline.backward if isinstance(e, BucketReady)], tables.outline.buckets
    )
    for clock in (beside, after):
        clock.finish()
    most = backward + sum(one.seconds for one in rounds)
    assert backward < beside.now < 1.01 * after.now < 1.01 * most


def test_two_directions_add_sums_over_the_ranks_with_the_same_stages(projector):
    one, two = (
        project(projector, {"pipeline": 4}, pipeline_schedule=name) for name in ("1f1b", "chimera")
    )
    assert one.step.gradients_exposed == 0 < two.step.gradients_exposed < two.step.busy
    assert two.memory.parameters > one.memory.parameters
    layers = two.step.forward + two.step.backward
    assert layers == pytest.approx(one.step.forward + one.step.backward, rel=0.5)


@pytest.mark.parametrize("copies", [1, 2])
def test_further_sharded_schemes_release_gradients_and_then_parameters(projector, copies):
    first, second, third = (
        project(projector, {"data": 4}, scheme=scheme, scheme_options={"copies": copies})
        for scheme in SHARDED
    )
    assert second.memory.gradients < first.memory.gradients == second.memory.parameters
    assert third.memory.parameters < second.memory.parameters
    assert third.memory.slots == second.memory.slots == copies * first.memory.parameters / 4
    assert third.step.busy > second.step.busy == first.step.busy  # one more gather
    costs = MessageCosts(projector.platform, second.work)  # of which nothing is hidden
    sums = [
        duration(costs.along_data(bucket)) + duration(costs.update(bucket.nbytes))
        for bucket in projector.tables(second.work).outline.buckets
    ]
    # beside the sum of losses, which shares the links with the first
    assert second.step.gradients_exposed == pytest.approx(sum(sums), rel=0.02)


@each(
    ("axes", "options", "message"),
    [
        ({"data": 128}, {}, "global batch of 64"),
        ({"data": 2}, {"scheme": "gossip"}, "no formula for scheme 'gossip' on cpu-10gbit"),
        *(
            (
                {"data": 4},
                {"scheme": "sharded", "scheme_options": {"copies": copies}},
                rf"no formula for scheme_options \{{'copies': {copies}\}}",
            )
            for copies in (0, 3)
        ),
        (
            {"data": 2, "pipeline": 2},
            {"scheme": "sharded_gradients", "compress": "top_k"},
            "no formula for compress 'top_k'",
        ),
        (
            {"data": 2, "pipeline": 2},
            {"pipeline_schedule": "chimera", "compress": "top_k"},
            "require sums of gradients that are neither exact nor compressed",
        ),
        ({"pipeline": 3}, {"pipeline_schedule": "chimera"}, "expected an even number of ranks"),
    ],
)
def test_what_has_no_formula_is_refused(projector, axes, options, message):
    with pytest.raises(ValueError, match=message):
        project(projector, axes, **options)
