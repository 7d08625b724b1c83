from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest

from benchmarks.paradl import Case, LayerList, LayerSize, project, sweep
from benchmarks.paradl.case import ALIASES, STRATEGIES
from benchmarks.paradl.corrected import Corrected
from benchmarks.paradl.projection import FORMULAS
from benchmarks.paradl.published import Published
from benchmarks.paradl.tool import VERSIONS, Printed
from tests.benchmarks.paradl.conftest import convolutions


def digits(value: float) -> str:
    """The 12 significant digits that the published tool prints."""
    return f"{value:.12g}"


# p: memory, computation, communication, total and cost of one epoch, as printed in the projections
DATA = {
    2: "7507837184 391.00032 6.2592776 397.2595976 14",
    4: "7507837184 195.50016 4.7113332 200.2114932 16",
    8: "7507837184 97.75008 11.0646421973 108.814722197 16",
    64: "7507837184 12.21876 1.7244303552 13.9431903552 64",
    128: "7507837184 6.10938 0.9469599552 7.0563399552 128",
    256: "7507837184 3.05469 0.555592572 3.610282572 256",
    1024: "7507837184 0.7636725 0.30978443034 1.07345693034 1024",
    2048: "7507837184 0.38183625 0.33345601342 0.71529226342 2048",
}

FILTER = {
    (2, 1024): "14259769408 434.663007094 98.4137676 533.076774694 18",
    (2, 512): "7250874432 434.663007094 98.5825176 533.245524694 18",
    (4, 512): "7128011792 260.994190642 148.3800264 409.374217042 28",
    (8, 512): "7067985156 174.159782415 695.6714982 869.831280615 120",
    (32, 512): "7023579728.25 109.033976245 796.6342614 905.668237645 512",
}

VGG_FILTER = {
    2: "8651858304 5465.10787204 2155.10112 7620.20899204 256",
    8: "8159003352 1648.17333606 15318.41304 16966.5863761 2264",
    64: "8021488699.38 534.90076307 19839.72312 20374.6238831 21760",
}

VGG_DATA_FILTER = {
    4: "9272222080 2920.48484805 3253.71168 6174.19652805 412",
    8: "9272222080 1460.24242403 10322.3003296 11782.5427536 1576",
    128: "9272222080 91.2651515017 1157.5851946 1248.8503461 2688",
    512: "9272222080 22.852793936 298.709316632 321.562110568 3072",
    1024: "9272222080 11.4629030286 152.01207433 163.474977358 3072",
}


def printed(case: Case, formulas: str) -> str:
    found = project(case, formulas)
    values = (found.memory, found.compute, found.communication, found.seconds, float(found.cost))
    return " ".join(map(digits, values))


@pytest.mark.parametrize("formulas", ["published", "printed"])
@pytest.mark.parametrize("ranks", DATA)
def test_data_parallel_alexnet_is_projected_to_the_printed_digits(abci, alexnet, ranks, formulas):
    case = Case(alexnet, abci, "data", ranks, 512 * ranks)
    assert printed(case, formulas) == DATA[ranks]


@pytest.mark.parametrize("strategy", ["filter", "channel"])
@pytest.mark.parametrize(("ranks", "batch"), FILTER)
def test_filters_and_channels_of_alexnet_are_projected_to_the_printed_digits(
    abci, alexnet, ranks, batch, strategy
):
    case = Case(convolutions(alexnet), abci, strategy, ranks, batch)
    assert printed(case, "printed") == FILTER[ranks, batch]
    assert printed(case, "published").split()[1:] == FILTER[ranks, batch].split()[1:]


@pytest.mark.parametrize("ranks", VGG_FILTER)
def test_filters_of_vgg_are_projected_to_the_printed_digits(abci, vgg, ranks):
    found = project(Case(convolutions(vgg), abci, "filter", ranks, 32), "printed")
    memory, *rest = VGG_FILTER[ranks].split()
    assert f"{found.memory:.2f}".startswith(memory)
    assert printed(found.case, "printed").split()[1:] == rest


@pytest.mark.parametrize("ranks", VGG_DATA_FILTER)
def test_data_and_filters_of_vgg_are_projected_to_the_printed_digits(slower, vgg, ranks):
    case = Case(convolutions(vgg), slower, "df", ranks, 8 * ranks, groups=ranks // 4)
    assert printed(case, "printed") == VGG_DATA_FILTER[ranks]


# log, number of ranks, ranks of a group, samples of a group: the same five values
RESNET_DATA_FILTER = {
    ("ranking_log/resnet/16/df.log", 8, 4, 64): (
        "15310729600 575.222370284 1180.7945424 1756.01691268 240"
    ),
    ("resnet_ranking.log", 8, 4, 64): "15310729600 575.222370284 1180.5945424 1755.81691268 240",
    ("resnet_ranking_2.log", 4, 2, 64): "15352101632 1048.97534019 731.8280736 1780.80341379 120",
    ("resnet_ranking_2.log", 8, 2, 64): "15352101632 524.487670095 416.2973688 940.785038895 128",
}

RESNET_SPATIAL = {
    2: "117658326528 2097.95068038 22.6110808 2120.56176118 72",
    4: "108632342016 1150.44474057 32.6559064 1183.10064697 80",
}

DATA_SPATIAL = {
    (
        "ranking_log/vgg/ds.log",
        4,
        4,
        32,
    ): "10491541760 2623.54833655 11670.1937984 14293.742135 956",
    (
        "ranking_log/vgg/ds.log",
        8,
        4,
        32,
    ): "10491541760 1311.77416828 14530.5413888 15842.3155571 2120",
    (
        "ranking_log/vgg/ds.log",
        1024,
        4,
        32,
    ): "10491541760 10.2482356897 185.046766644 195.295002334 4096",
    (
        "ranking_log/cosmoflow.log",
        4,
        4,
        1,
    ): "59963036064 877.803215834 2556.05851937 3433.8617352 232",
    (
        "ranking_log/cosmoflow.log",
        128,
        4,
        1,
    ): "59963036064 27.7084348432 81.336944256 109.045379099 256",
    (
        "ranking_log/cosmoflow.log",
        1024,
        4,
        1,
    ): "59963036064 3.87918087805 11.5179836386 15.3971645166 1024",
    ("ranking_log/resnet/1024/cosmoflow.log_2", 64, 4, 1): (
        "59963036064 54.8627009896 160.126192164 214.988893153 256"
    ),
    (
        "ranking_log/cosmoflow_256.log",
        4,
        4,
        8,
    ): "60683437568 90.3154551338 94.7466676886 185.062122822 16",
    (
        "ranking_log/cosmoflow_256.log",
        32,
        4,
        8,
    ): "60683437568 11.2894318917 12.21541476 23.5048466517 32",
    (
        "ranking_log/cosmoflow_256.log",
        8,
        4,
        1,
    ): "7600326144 45.1577275669 81.0733362278 126.231063795 24",
    (
        "ranking_log/resnet/64/data+spatial.log",
        4,
        4,
        256,
    ): "107183259136 1037.29470679 1381.6365096 2418.93121639 164",
    (
        "ranking_log/resnet/64/data+spatial.log",
        8,
        4,
        256,
    ): "107183259136 518.647353397 727.3942304 1246.0415838 168",
    (
        "ranking_log/resnet/64/data+spatial.log",
        64,
        4,
        256,
    ): "107183259136 64.8309191746 95.4078528106 160.238771985 192",
    (
        "ranking_log/resnet/16/data+spatial.log",
        4,
        4,
        256,
    ): "107183259136 1037.29470679 812.4861096 1849.78081639 124",
    (
        "ranking_log/resnet/16/data+spatial.log",
        8,
        4,
        256,
    ): "107183259136 518.647353397 442.8190304 961.466383797 136",
    (
        "ranking_log/resnet/16/data+spatial.log",
        16,
        4,
        256,
    ): "107183259136 259.323676699 230.7046716 490.028348299 144",
    ("resnet_ranking.log", 4, 4, 64): "26932218880 1037.29470679 85.1019648 1122.39667159 76",
    ("resnet_ranking.log", 8, 4, 64): "26932218880 518.647353397 334.1525872 852.799940597 120",
    ("resnet_ranking.log", 4096, 4, 64): "26932218880 1.0129831121 2.5156484832 3.5286315953 4096",
    ("resnet_ranking_2.log", 2, 2, 64): "29188715008 1984.8006466 60.3367296 2045.1373762 70",
    ("resnet_ranking_2.log", 4, 2, 64): "29188715008 992.400323302 103.097216 1095.4975393 76",
    (
        "resnet_ranking_2.log",
        4096,
        2,
        64,
    ): "29188715008 0.969140940725 1.8801961992 2.84933713992 4096",
}


@pytest.mark.parametrize(("log", "ranks", "parts", "samples"), RESNET_DATA_FILTER)
def test_versions_of_the_tool_share_the_rings_of_filters_as_they_have_printed(
    abci, slower, resnet, log, ranks, parts, samples
):
    groups = ranks // parts
    platform = slower if "ranking_log" in log else abci
    batch = samples * groups
    case = Case(convolutions(resnet), platform, "df", ranks, batch, groups=groups)
    assert of_version(case, log) == RESNET_DATA_FILTER[log, ranks, parts, samples]


def test_a_version_without_shared_rings_is_the_one_that_has_printed_vgg_again(slower, vgg):
    case = Case(convolutions(vgg), slower, "df", 8, 64, groups=2)
    assert of_version(case, "ranking_log/vgg/df.log2") == (
        "9272222080 1460.24242403 2715.1972512 4175.43967523 560"
    )


def test_data_parallelism_rounds_the_samples_of_a_rank_up(abci, resnet):
    found = project(Case(resnet, abci, "data", 4096, 262144), "printed")
    assert digits(found.compute) == "0.976404126"


@pytest.mark.parametrize("ranks", RESNET_SPATIAL)
def test_stripes_of_resnet_are_projected_to_the_printed_digits(abci, resnet, ranks):
    case = Case(convolutions(resnet), abci, "spatial", ranks, 256)
    assert of_version(case, "ranking_log/resnet/4/spatial.log") == RESNET_SPATIAL[ranks]


@pytest.mark.parametrize(("log", "ranks", "parts", "samples"), DATA_SPATIAL)
def test_data_and_stripes_are_projected_to_the_printed_digits(
    abci, slower, resnet, vgg, cosmoflow, log, ranks, parts, samples
):
    nets = {
        "cosmoflow_256": cosmoflow[256],
        "cosmoflow": cosmoflow[512],
        "vgg": convolutions(vgg, "MPOOL"),
        "resnet": convolutions(resnet),
    }
    net = next(net for name, net in nets.items() if name in log)
    groups = ranks // parts
    platform = slower if "ranking_log" in log else abci
    case = Case(net, platform, "ds", ranks, samples * groups, groups=groups)
    assert of_version(case, log) == DATA_SPATIAL[log, ranks, parts, samples]


def of_version(case: Case, log: str) -> str:
    """The values that the version of the tool prints that has written a log."""
    terms = Printed(replace(case, network=case.network.distribute()), VERSIONS[log])
    compute, communication = terms.compute(), terms.communication()
    seconds = compute + communication
    cost = float(case.ranks * ceil(seconds / 60))
    return " ".join(map(digits, (terms.memory(), compute, communication, seconds, cost)))


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


@pytest.mark.parametrize("formulas", FORMULAS)
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


def test_a_total_time_is_divided_as_in_the_printed_list(alexnet):
    """Seconds of single layers of AlexNet, as the published tool divides the total."""
    found = {x.name: x.forward + x.backward for x in alexnet.distribute().layers}
    assert found["CONV1"] == pytest.approx(5.1364413464e-05, rel=1e-11)
    assert found["CONV5"] == pytest.approx(7.56836554327e-05, rel=1e-11)
    assert found["FC8"] == pytest.approx(1.55267633827e-06, rel=1e-11)
    right = alexnet.distribute(published=False).layers
    assert next(x for x in right if x.name == "CONV5").backward > 2 / 3 * found["CONV5"]
    assert sum(x.forward + x.backward for x in right) == pytest.approx(0.000610938)


@pytest.mark.parametrize(
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


def test_a_rank_with_too_little_memory_is_a_problem(abci):
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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"strategy": "filers"}, "paradl: unknown strategy 'filers'; did you mean 'filter'"),
        ({"ranks": 0}, "paradl: ranks must be at least 1, got 0"),
        ({"ranks": 4, "groups": 3}, "groups must divide the ranks, 4, got 3"),
    ],
)
def test_a_wrong_case_is_one_sentence(abci, given, message):
    arguments = {"strategy": "data", "ranks": 2, "batch": 64} | given
    with pytest.raises(ValueError, match=message):
        Case(NET, abci, **arguments)


def test_unknown_formulas_are_one_sentence(abci):
    with pytest.raises(ValueError, match="did you mean 'corrected'"):
        project(Case(NET, abci, "data", 2, 64), "correct")


def test_the_printed_memory_divides_weights_twice(abci):
    case = Case(NET, abci, "filter", 2, 64)
    twice, once = Printed(case).memory(), Published(case).memory()
    assert once - twice == pytest.approx(8 * (162 + 1500 + 6400) / 4)
