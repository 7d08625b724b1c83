from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest

from benchmarks.paradl import Case, LayerList, LayerSize, project, sweep
from benchmarks.paradl.case import ALIASES, STRATEGIES
from benchmarks.paradl.corrected import Corrected
from benchmarks.paradl.projection import FORMULAS
from benchmarks.paradl.published import Published
from benchmarks.paradl.tool import LATEST, VERSIONS, Printed
from tests.benchmarks.paradl.conftest import convolutions
from tests.each import each

# Rows of the published projections: the log, a strategy, a network, the ranks, those of a group and
# samples of a group; then memory, computation, communication, total and cost of one epoch. Logs
# without a name are the same in all versions of the tool.
PRINTED = """
- data alexnet 2 1 512 7507837184 391.00032 6.2592776 397.2595976 14
- data alexnet 8 1 512 7507837184 97.75008 11.0646421973 108.814722197 16
- filter alexnet 2 2 1024 14259769408 434.663007094 98.4137676 533.076774694 18
- filter alexnet 32 32 512 7023579728.25 109.033976245 796.6342614 905.668237645 512
- channel alexnet 8 8 512 7067985156 174.159782415 695.6714982 869.831280615 120
- df vgg 8 4 32 9272222080 1460.24242403 10322.3003296 11782.5427536 1576
ranking_log/vgg/df.log2 df vgg 8 4 32 9272222080 1460.24242403 2715.1972512 4175.43967523 560
ranking_log/resnet/16/df.log df resnet 8 4 64 \
    15310729600 575.222370284 1180.7945424 1756.01691268 240
resnet_ranking.log df resnet 8 4 64 15310729600 575.222370284 1180.5945424 1755.81691268 240
resnet_ranking_2.log df resnet 4 2 64 15352101632 1048.97534019 731.8280736 1780.80341379 120
ranking_log/resnet/4/spatial.log spatial resnet 4 4 256 \
    108632342016 1150.44474057 32.6559064 1183.10064697 80
ranking_log/vgg/ds.log ds vgg 8 4 32 10491541760 1311.77416828 14530.5413888 15842.3155571 2120
ranking_log/cosmoflow.log ds cosmoflow_512 4 4 1 \
    59963036064 877.803215834 2556.05851937 3433.8617352 232
ranking_log/resnet/1024/cosmoflow.log_2 ds cosmoflow_512 64 4 1 \
    59963036064 54.8627009896 160.126192164 214.988893153 256
ranking_log/cosmoflow_256.log ds cosmoflow_256 32 4 8 \
    60683437568 11.2894318917 12.21541476 23.5048466517 32
ranking_log/resnet/64/data+spatial.log ds resnet 8 4 256 \
    107183259136 518.647353397 727.3942304 1246.0415838 168
ranking_log/resnet/16/data+spatial.log ds resnet 16 4 256 \
    107183259136 259.323676699 230.7046716 490.028348299 144
resnet_ranking.log ds resnet 8 4 64 26932218880 518.647353397 334.1525872 852.799940597 120
resnet_ranking_2.log ds resnet 4096 2 64 \
    29188715008 0.969140940725 1.8801961992 2.84933713992 4096
""".replace("\\\n", "")


@each("row", PRINTED.strip().splitlines())
def test_projections_have_the_printed_digits(row, abci, slower, nets):
    log, strategy, name, ranks, parts, samples, *values = row.split()
    groups = int(ranks) // int(parts)
    net = nets[name]
    if strategy != "data" and "cosmoflow" not in name:
        net = convolutions(net, *(["MPOOL"] if (strategy, name) == ("ds", "vgg") else []))
    platform = slower if "ranking_log" in log or (log, strategy) == ("-", "df") else abci
    hybrid = {"groups": groups} if strategy in ("df", "ds") else {}
    case = Case(net, platform, strategy, int(ranks), int(samples) * groups, **hybrid)
    terms = Printed(replace(case, network=net.distribute()), VERSIONS.get(log, LATEST))
    assert of(terms) == values
    if strategy in ("data", "filter", "channel"):  # which differ from Table III in memory alone
        published = Published(replace(case, network=net.distribute()))
        assert of(published)[1:] == values[1:]


def of(terms: Published) -> list[str]:
    """The values that the tool prints, with its 12 significant digits."""
    compute, communication = terms.compute(), terms.communication()
    cost = float(terms.case.ranks * ceil((compute + communication) / 60))
    values = (terms.memory(), compute, communication, compute + communication, cost)
    return [f"{value:.12g}" for value in values]


NET = LayerList(
    "small",
    1000,
    (
        LayerSize("CONV1", (3, 8, 8), (3, 6, 3, 3), (6, 8, 8), 1e-3, 2e-3, 1e-4),
        LayerSize("RELU", (6, 8, 8), (0,), (6, 8, 8), 1e-4, 1e-4),
        LayerSize("CONV2", (6, 8, 8), (6, 10, 5, 5), (10, 8, 8), 3e-3, 5e-3, 2e-4),
        LayerSize("FC", (640,), (640, 10), (10,), 1e-3, 1e-3, 5e-4),
    ),
)


def test_the_formulas_are_those_of_table_iii(abci):
    """Every term by hand: D = 1000, B = 64, 16 steps, p = 2, delta = 4."""
    alpha, beta = 9e-6, 1 / 50e9
    time, update, weights = 13.2e-3, 8e-4, 162 + 1500 + 6400
    xs, ys = 192 + 384 + 640, 384 + 640 + 10  # without ReLU

    def terms(strategy: str, **more: int) -> list[float]:
        found = project(Case(NET, abci, strategy, 2, 64, **more), "published")
        return [found.compute, found.communication, found.memory]

    gradients = 2 * 16 * (alpha + weights / 2 * 4 * beta)
    assert terms("data") == pytest.approx(
        [500 * time + 16 * update, gradients, 8 * (32 * (xs + ys) + weights)]
    )
    halos = (1 * 3 * 8 + 1 * 6 * 8) + (2 * 6 * 8 + 2 * 10 * 8)
    assert terms("spatial") == pytest.approx(
        [
            500 * time + 16 * update,
            gradients + 16 * 2 * (2 * 2 * alpha + 64 * halos * 4 * beta),
            8 * (32 * (xs + ys) + weights),
        ]
    )
    layers = 3 * 16 * (3 * alpha + 64 * (384 + 384 + 640) / 2 * 4 * beta)
    for strategy in ("filter", "channel"):
        assert terms(strategy) == pytest.approx(
            [500 * time + 16 * update / 2, layers, 8 * (64 * (xs + ys) + weights / 2)]
        )
    assert terms("data+filter", groups=2) == pytest.approx(
        [500 * time + 16 * update, gradients, 8 * (32 * (xs + ys) + weights)]
    )
    # stages: {CONV1, RELU} with 3.2 ms, {CONV2, FC} with 10 ms; 4 segments
    sent = alpha + 16 * 384 * 4 * beta
    assert terms("pipeline", segments=4) == pytest.approx(
        [
            1000 * 5 / 4 * (4e-3 + 6e-3 + 7e-4),
            2 * 16 * 4 * sent,
            8 * (64 * (384 + 640 + 640 + 10) + 1500 + 6400),
        ]
    )


@each("formulas", FORMULAS)
def test_one_rank_sends_nothing_and_hybrids_of_one_kind_are_that_kind(abci, formulas):
    """Identities: p = 1, p1 = 1 and p2 = 1."""
    for strategy in STRATEGIES:
        found = project(Case(NET, abci, strategy, 1, 64), formulas)
        assert found.communication == 0, strategy
    if formulas == "printed":
        return
    for hybrid, groups, same in (
        ("data+filter", 1, "filter"),
        ("data+filter", 4, "data"),
        ("data+spatial", 4, "data"),
    ):
        one = project(Case(NET, abci, hybrid, 4, 64, groups=groups), formulas)
        other = project(Case(NET, abci, same, 4, 64), formulas)
        assert one.compute == pytest.approx(other.compute), hybrid
        assert one.memory == pytest.approx(other.memory), hybrid
        if formulas == "published" or same != "data":  # which has overlap
            assert one.communication == pytest.approx(other.communication), hybrid


def test_corrections_change_the_terms_that_they_name(abci):
    def both(strategy: str, ranks: int, net: LayerList = NET, **more: int) -> tuple:
        case = Case(net, abci, strategy, ranks, 64, **more)
        return Published(case), Corrected(case)

    published, corrected = both("data", 3)
    assert corrected.passes(3, 1) == pytest.approx(16 * 22 * 13.2e-3)  # 22 of 64 samples, 16 steps
    assert published.passes(3, 1) == pytest.approx(1000 / 3 * 13.2e-3)
    assert corrected.gradients(3) < published.gradients(3)  # overlap
    published, corrected = both("filter", 4)
    assert corrected.share(NET.layers[0], 4) == 2 / 6
    assert published.share(NET.layers[0], 4) == 1 / 4
    assert corrected.pipeline_update(5000.0) == pytest.approx(16 * 5e-4)  # of FC
    one, other = (both(name, 2)[1].communication() for name in ("filter", "channel"))
    assert one != other
    even = replace(NET, layers=(replace(NET.layers[0], w=(3, 6, 2, 2)), *NET.layers[1:]))
    published, corrected = both("spatial", 2, even)
    assert published.halo(even.layers[0], (3, 8, 8)) == 0
    assert corrected.halo(even.layers[0], (3, 8, 8)) == 12
    published, corrected = both("data+filter", 8, groups=2)
    assert corrected.between(1e6) > corrected.ring(2, 1e6, corrected.case.link(8))
    serial_published, serial = both("serial", 1)
    assert serial.memory() < serial_published.memory()


def test_a_total_time_is_divided_as_in_the_printed_list(nets):
    """Seconds of single layers of AlexNet, as the published tool divides the total."""
    found = {x.name: x.forward + x.backward for x in nets["alexnet"].distribute().layers}
    assert found["CONV1"] == pytest.approx(5.1364413464e-05, rel=1e-11)
    assert found["CONV5"] == pytest.approx(7.56836554327e-05, rel=1e-11)
    assert found["FC8"] == pytest.approx(1.55267633827e-06, rel=1e-11)
    right = nets["alexnet"].distribute(published=False).layers
    assert next(x for x in right if x.name == "CONV5").backward > 2 / 3 * found["CONV5"]
    assert sum(x.forward + x.backward for x in right) == pytest.approx(0.000610938)


@each(
    ("strategy", "ranks", "problem"),
    [
        ("data", 128, "at most 64 ranks: a sample per rank"),
        ("filter", 16, "at most 6 ranks: a filter per rank, of 6"),
        ("channel", 8, "at most 6 ranks: a channel per rank, of 6"),
        ("pipeline", 5, "at most 4 ranks: a layer per rank"),
        ("spatial", 128, "at most 64 ranks"),
    ],
)
def test_limits_name_what_limits_the_ranks(abci, strategy, ranks, problem):
    net = NET.with_split([True, True, True, False])
    assert problem in project(Case(net, abci, strategy, ranks, 64)).problem
    small = replace(abci, cluster=replace(abci.cluster, memory_per_rank=1e5))
    assert "more than 0.0001 GB" in project(Case(NET, small, "data", 2, 64)).problem


def test_a_sweep_has_the_batches_of_each_strategy(abci):
    strategies = [*ALIASES]
    found = list(sweep(NET, abci, strategies, [2, 4, 8], per_rank=16))
    assert {(c.ranks, c.batch) for c in found if c.strategy == "data"} == {
        (2, 32),
        (4, 64),
        (8, 128),
    }
    assert {c.batch for c in found if c.strategy == "filter"} == {16}
    assert {(c.ranks, c.groups, c.batch) for c in found if c.strategy == "data+filter"} == {
        (4, 1, 16),
        (8, 2, 32),
    }
    assert [c.ranks for c in found if c.strategy == "serial"] == [1]
