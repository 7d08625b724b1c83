"""Choosing among algorithms, with a clock that only candidates move, disturbed at will."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pydtnn
from pydtnn.kernels import ConvGeometry, autotuner, create_backend, report
from pydtnn.kernels.autotuner import (
    BUDGET,
    MAX_BATCH_RATIO,
    MAX_MEASUREMENT_S,
    MODES,
    ROUNDS,
    Autotuner,
    AutotunerFile,
    Winner,
    fastest,
    nearest,
    rule,
    shortest_times,
    switches,
)
from pydtnn.kernels.cpu.conv import candidates
from pydtnn.utils.machine import cpu_model
from tests.each import each

THREE = ("direct", "winograd4", "winograd2")
FLOAT = np.dtype("float32")


def geometry(channels: int = 16, size: int = 8, kernel: int = 3) -> ConvGeometry:
    around = ((kernel // 2, kernel // 2),) * 2
    return ConvGeometry((size, size), (kernel,) * 2, (1, 1), around, (1, 1), channels, channels)


class Machine:
    """Candidates take the given times, one after another; some calls lose a core."""

    def __init__(
        self, disturbed: Callable[[int, str], bool] = lambda call, name: False, **seconds: list
    ) -> None:
        self.disturbed, self.now, self.lost = disturbed, 0.0, 0
        self.seconds = seconds or {"direct": [1.0], "winograd4": [0.5], "winograd2": [0.7]}
        self.order: list[str] = []

    def run(self, name: str) -> None:
        times = self.seconds[name]
        self.now += times[self.order.count(name) % len(times)]
        self.order.append(name)
        self.lost += self.disturbed(len(self.order), name)

    def times(self) -> dict[str, float]:
        return shortest_times(tuple(self.seconds), self.run, lambda: self.now, lambda: self.lost)

    @property
    def measured(self) -> float:
        """How often all candidates were measured."""
        return self.order.count("direct") / (1 + ROUNDS[0])


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYDTNN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def tuner(machine: Machine, mode: str = "measure", setting: str = "avx2, 1 thread") -> Autotuner:
    clocks = {"clock": lambda: machine.now, "disturbances": lambda: machine.lost}
    return Autotuner(mode, setting, file=AutotunerFile("some CPU"), **clocks)


def pick(
    own: Autotuner,
    machine: Machine,
    *,
    operation: str = "forward",
    batch: int = 64,
    candidates: tuple[str, ...] = THREE,
    where: ConvGeometry | None = None,
) -> str:
    return own.pick(operation, where or geometry(), batch, FLOAT, candidates, machine.run)


# -- timing candidates


def test_the_shortest_time_counts_but_not_the_first_of_candidates_that_take_turns():
    machine = Machine(direct=[1.0], other=[0.01, 5.0, 0.5, 0.7])
    assert machine.times() == pytest.approx({"direct": 1.0, "other": 0.5})
    assert machine.order == ["direct", "other"] * (1 + ROUNDS[0])


@each("seconds, rounds", [(BUDGET, ROUNDS[0]), (BUDGET / 15, 8), (BUDGET / 1e4, ROUNDS[1])])
def test_measuring_ends_with_its_budget_but_not_before_it_knows(seconds, rounds):
    machine = Machine(direct=[seconds], other=[seconds])
    machine.times()
    assert machine.order.count("direct") == 1 + rounds


def test_calls_that_lost_a_core_do_not_count_and_are_tried_again_but_not_for_ever():
    quick = Machine(lambda call, _: call % 4 == 0, direct=[0.01], other=[0.02, 0.001])
    assert quick.times() == pytest.approx({"direct": 0.01, "other": 0.02})
    s = BUDGET / 5
    late = Machine(lambda call, _: call < 20, direct=[s], other=[s])
    assert late.times() == pytest.approx({"direct": s, "other": s})
    never = Machine(lambda call, _: call % 2 == 0, direct=[s], other=[s])
    assert never.times() == {"direct": pytest.approx(s), "other": math.inf}
    assert never.now == pytest.approx(MAX_MEASUREMENT_S + 2 * s, abs=2 * s)
    assert switches() >= 0


# -- choosing by times and by rule


@each("share, chosen", [(0.99, "direct"), (0.975, "direct"), (0.9, "other")])
def test_the_first_candidate_stays_unless_another_is_clearly_faster(share, chosen):
    assert fastest({"direct": 1.0, "other": share, "third": 2.0}, "third") == chosen


def test_where_a_time_is_missing_the_rule_decides(cache):
    times = {"direct": [1.0], "winograd4": [2.0], "winograd2": [0.5]}
    machine = Machine(lambda _, name: name == "direct", **times)
    own = tuner(machine)
    assert pick(own, machine) == rule(geometry(), THREE) == "winograd4"
    (why,) = own.report().values()
    assert why == "winograd4, by rule, as the machine was too busy for measuring"
    again = tuner(Machine(**times))  # the file holds that, too: the same bytes as before
    assert pick(again, machine) == "winograd4"
    assert again.report() == own.report()


@each(
    "kernel, stride, channels, size, chosen",
    [  # some channels, and a map that tiles fit on
        *(((3, 3), 1, 16, 8, "winograd4"), ((3, 3), 1, 8, 8, "direct")),
        *(((3, 3), 1, 512, 4, "winograd4"), ((3, 3), 1, 512, 3, "winograd2")),
        *(((3, 3), 1, 16, 2, "winograd2"), ((3, 3), 1, 16, 1, "direct")),
        # large filters for a stride of 2
        *(((7, 7), 2, 3, 224, "polyphase"), ((5, 5), 2, 16, 16, "polyphase")),
        *(((7, 7), 2, 3, 14, "direct"), ((3, 3), 2, 64, 56, "direct")),
        # maps of whole tiles for lines and for 5x5
        *(((1, 7), 1, 16, 5, "winograd5"), ((7, 1), 1, 16, 4, "direct")),
        *(((1, 7), 1, 8, 17, "direct"), ((1, 5), 1, 16, 8, "winograd4")),
        *(((5, 5), 1, 16, 3, "direct"), ((3, 1), 1, 16, 4, "winograd4")),
    ],
)
def test_the_rule_wants_channels_and_maps_that_tiles_fit_on(kernel, stride, channels, size, chosen):
    around = tuple((k // 2, k // 2) for k in kernel)
    filters = 64 if stride == 2 else 16
    where = ConvGeometry((size, size), kernel, (stride,) * 2, around, (1, 1), channels, filters)
    machine, names = Machine(), candidates(where)
    assert rule(where, names) == chosen
    for setting in ("avx2, 1 thread", "avx2, 2 threads"):
        own = tuner(machine, "fixed", setting)
        assert pick(own, machine, where=where, candidates=names) == chosen
        direct = tuner(machine, "direct", setting)
        assert pick(direct, machine, where=where, candidates=names) == "direct"
    assert rule(where, ("direct", "gemm")) == "direct"
    assert not machine.order


# -- keys


def test_operations_geometries_dtypes_and_very_different_batches_are_measured_once(cache):
    machine = Machine()
    own = tuner(machine)
    assert {pick(own, machine) for _ in range(5)} == {"winograd4"}
    assert own.resolved == {("forward", geometry(), 64, FLOAT): "winograd4"}
    assert machine.measured == 1
    for batch in (64 * MAX_BATCH_RATIO, 64 // MAX_BATCH_RATIO, 63):
        assert pick(own, machine, batch=batch) == "winograd4"
    assert machine.measured == 1
    pick(own, machine, operation="backward_data")
    pick(own, machine, where=geometry(32))
    pick(own, machine, batch=64 * MAX_BATCH_RATIO + 1)
    own.pick("forward", geometry(), 64, np.dtype("float64"), THREE, machine.run)
    assert machine.measured == 5


@each("batch, near", [(1, 4), (8, 4), (9, 16), (16, 16), (10**6, 16)])
def test_the_nearest_batch_is_that_of_the_smallest_ratio(batch, near):
    assert nearest([16, 4], batch) == near
    assert nearest([], batch) is None
    assert nearest([0, -3], batch) is None


def test_without_an_alternative_or_a_sample_nothing_is_measured(cache):
    machine = Machine()
    own = tuner(machine)
    assert pick(own, machine, candidates=("direct",)) == "direct"
    assert pick(own, machine, batch=0) == "direct"
    assert not machine.order
    assert not cache.exists()


def test_what_the_text_of_a_geometry_says_is_all_that_two_can_differ_in():
    plain = geometry()
    others = [
        *(
            replace(plain, size=(8, 9)),
            replace(plain, kernel=(3, 1)),
            replace(plain, stride=(2, 1)),
        ),
        *(replace(plain, padding=p) for p in (((1, 1), (0, 1)), ((0, 0),) * 2, ((2, 2),) * 2)),
        *(replace(plain, dilation=(1, 2)), replace(plain, channels=8), replace(plain, filters=8)),
        replace(plain, groups=2),
        replace(plain, size=(8,), kernel=(3,), stride=(1,), padding=((1, 1),), dilation=(1,)),
    ]
    assert str(plain) == "3x3 16->16 on 8x8 padding 1"
    assert len({str(g) for g in [plain, *others]}) == len({plain, *others}) == 1 + len(others)


# -- modes


def test_the_environment_says_how_to_choose_and_the_caller_knows_better(monkeypatch):
    for mode in MODES:
        monkeypatch.setenv("PYDTNN_TUNING", mode)
        assert create_backend("cpu").autotuner.mode == mode
        assert create_backend("cpu", tuning="direct").autotuner.mode == "direct"
    monkeypatch.setenv("PYDTNN_TUNING", "fix")
    with pytest.raises(ValueError, match="unknown value of PYDTNN_TUNING 'fix'"):
        create_backend("cpu")
    monkeypatch.delenv("PYDTNN_TUNING")
    assert create_backend("cpu").autotuner.mode == "measure"
    with pytest.raises(ValueError, match="unknown tuning 'mesure'; did you mean 'measure'"):
        create_backend("cpu", tuning="mesure")


def test_the_report_says_what_was_chosen_and_why(cache):
    machine = Machine()
    own = tuner(machine)
    pick(own, machine)
    pick(own, machine, batch=40)
    pick(own, machine, where=geometry(kernel=1), candidates=("direct",))
    found = report(replace(create_backend("cpu"), autotuner=own))
    where = "conv.forward 3x3 16->16 on 8x8 padding 1 float32, batch"
    assert found["conv.forward"] == "cpu"
    assert found[f"{where} 64"] == (
        "winograd4, measured: winograd4 500 ms, winograd2 700 ms, direct 1e+03 ms"
    )
    assert found[f"{where} 40"] == "winograd4, as for batch 64"
    alone = found["conv.forward 1x1 16->16 on 8x8 float32, batch 64"]
    assert alone == "direct, without an alternative"


def test_every_candidate_computes_when_it_is_measured(monkeypatch, rng):
    conv, shape = create_backend("cpu", threads=1, tuning="measure").conv, geometry()
    x, dy, y, dx = rng.normal(size=(4, 2, 8, 8, 16)).astype("float32")
    w, dw = rng.normal(size=(2, 16, 3, 3, 16)).astype("float32")
    picked = []

    def pick(operation: str, *key: Any) -> str:
        *_, known, run = key
        out = {"forward": y, "backward_data": dx, "backward_filter": dw}[operation]
        for name in known:
            out[:] = np.nan
            run(name)
            picked.append((operation, name, bool(np.isfinite(out).all())))
        return known[0]

    monkeypatch.setattr(conv.autotuner, "pick", pick)
    conv.forward(x, w, None, shape, out=y)
    conv.backward_data(dy, w, shape, out=dx)
    conv.backward_filter(x, dy, shape, out=dw)
    assert len(picked) > 6
    assert all(computed for _, _, computed in picked)


def test_measuring_leaves_no_trace_in_what_a_convolution_computes(cache, cpu_backend, rng):
    """Also where it adds to its output, whose former content measuring must not touch."""
    isa = cpu_backend.isa
    conv = create_backend("cpu", threads=1, isa=isa, tuning="measure").conv
    plain = create_backend("cpu", threads=1, isa=isa, tuning="direct").conv
    shape = geometry()
    x, w, dy, before = (rng.normal(size=s) for s in 2 * [(2, 8, 8, 16), (16, 3, 3, 16)])
    results = []
    for own, algorithms in ((conv, {}), (plain, conv.autotuner.resolved)):
        named = {key[0]: {"algorithm": name} for key, name in algorithms.items()}
        y, dx, dw = np.empty_like(x), dy.copy(), before.copy()
        own.forward(x, w, None, shape, out=y, **named.get("forward", {}))
        own.backward_data(dy, w, shape, out=dx, add=dx, **named.get("backward_data", {}))
        own.backward_filter(
            x, dy, shape, out=dw, accumulate=True, **named.get("backward_filter", {})
        )
        results.append((y, dx, dw))
    assert len(conv.autotuner.resolved) == 3
    for measured, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(measured, expected)


# -- agreement and state


def test_after_freezing_nothing_is_measured(cache):
    machine = Machine()
    own = tuner(machine)
    table = {"forward 3x3 16->16 on 8x8 padding 1 float32": {64: Winner("winograd2", {})}}
    own.freeze({str(own.kind): table})
    assert pick(own, machine) == pick(own, machine, batch=1) == "winograd2"
    assert pick(own, machine, where=geometry(32)) == "winograd4"  # by rule
    assert not machine.order
    assert own.open() == table
    pick(own, machine, where=geometry(32))
    assert machine.order


def test_what_was_agreed_on_comes_back_without_times_but_for_other_kinds_of_machines(cache):
    machine = Machine()
    own = tuner(machine)
    pick(own, machine)
    assert own.state() == {}  # nobody has agreed yet
    own.freeze({str(own.kind): own.open(), "another kind": {}})
    slower = Machine(direct=[1.0], winograd4=[1.5], winograd2=[0.7])
    resumed, other = tuner(slower), tuner(slower, setting="avx2, 2 threads")
    for loaded in (resumed, other):
        loaded.load(own.state())
        assert loaded.state() == own.state()
    assert "0.5" not in repr(own.state())
    assert pick(resumed, slower) == "winograd4"
    assert not slower.order
    assert pick(other, slower) == "winograd2"
    other.freeze({str(other.kind): other.open()})
    assert own.state()["measured"].items() < other.state()["measured"].items()


# -- the file


def test_a_second_process_takes_what_the_first_has_measured_even_meanwhile(cache):
    fast, slow = Machine(), Machine(direct=[1.0], winograd4=[2.0], winograd2=[0.7])
    meanwhile = tuner(slow)
    meanwhile.file.find("avx2, 1 thread", "", 1, THREE)  # has read the file before
    assert pick(tuner(fast), fast) == "winograd4"
    own = tuner(slow)
    assert pick(own, slow) == "winograd4"
    assert not slow.order
    assert "winograd4 500 ms" in next(iter(own.report().values()))
    assert pick(meanwhile, slow) == "winograd4"


def test_settings_batches_candidates_and_machines_do_not_mix(cache):
    machine = Machine()
    pick(tuner(machine), machine)
    pick(tuner(machine, setting="avx2, 2 threads"), machine)
    pick(tuner(machine), machine, batch=32)  # in another process nothing is near
    other = Autotuner("measure", "avx2, 1 thread", file=AutotunerFile("other"))
    other.clock, other.disturbances = lambda: machine.now, lambda: 0
    pick(other, machine)
    assert machine.measured == 4
    assert len([*cache.glob("choices-*.jsonl")]) == 2
    machine.seconds["winograd2"] = [0.1]
    assert pick(tuner(machine), machine, candidates=("direct", "winograd2")) == "winograd2"
    assert machine.measured == 5
    seconds = {"direct": 1.0, "other": 2.0}
    AutotunerFile("a CPU").add("setting", "operation", 8, Winner("neither", seconds))
    assert AutotunerFile("a CPU").find("setting", "operation", 8, ["direct", "other"]) is None


CHOICE = {"machine": "some CPU", "setting": "avx2, 1 thread", "batch": 64, "name": "direct"}
WHAT = "forward 3x3 16->16 on 8x8 padding 1 float32"


def line(seconds: object = None, **changed: object) -> bytes:
    known = dict.fromkeys(THREE, 1.0) if seconds is None else seconds
    return json.dumps({**CHOICE, "operation": WHAT, "seconds": known, **changed}).encode()


@each(
    "content",
    [b"", b"{", b"\xff\0", b"[]", b"null", b"[" * 100_000, line()[:-9], line({}), line("x")]
    + [line({**dict.fromkeys(THREE, 1.0), "direct": wrong}) for wrong in (10**400, "x", [])]
    + [line(machine="other"), line(name="other"), line(name=[]), line(batch="x"), line(setting=[])],
)
def test_a_line_that_is_no_choice_is_measured_again(content, cache, caplog):
    cache.mkdir(exist_ok=True)
    machine = Machine()
    own = tuner(machine)
    own.file.path.write_bytes(content)
    assert pick(own, machine) == pick(tuner(machine), machine) == "winograd4"
    assert machine.measured == 1
    assert not caplog.records


def test_of_two_choices_the_first_counts_and_a_file_that_is_too_long_is_replaced(
    cache, monkeypatch
):
    cache.mkdir(exist_ok=True)
    machine = Machine()
    own = tuner(machine)
    own.file.path.write_bytes(b"\n".join([line(), line(name="winograd2")]))
    assert pick(own, machine) == "direct"
    assert not machine.order
    monkeypatch.setattr(autotuner, "MAX_TEXT_B", 10)
    assert own.file.count() == 1
    assert not own.file.path.exists()


def refuse(*args: object) -> None:
    raise PermissionError("read-only")


def homeless() -> Path:
    raise RuntimeError("Could not determine home directory.")


@each("trouble", ["read-only", "home directory", "not a directory", "is a directory"])
def test_where_choices_cannot_be_stored_one_can_train_and_is_told_once(
    trouble, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("PYDTNN_CACHE", str(tmp_path))
    machine = Machine()
    own = tuner(machine)
    if trouble == "read-only":
        monkeypatch.setattr(autotuner, "open", refuse, raising=False)
    elif trouble == "home directory":
        monkeypatch.delenv("PYDTNN_CACHE")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", homeless)
    elif trouble == "not a directory":
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("PYDTNN_CACHE", str(tmp_path / "file"))
    else:
        own.file.path.mkdir()
    assert pick(own, machine) == "winograd4"
    assert pick(own, machine, operation="backward_data") == "winograd4"
    (record,) = caplog.records
    assert "PYDTNN_CACHE" in record.getMessage()
    assert trouble in record.getMessage().lower()


def test_processes_that_measure_at_the_same_time_lose_nothing(cache):
    files = [AutotunerFile("some CPU") for _ in range(8)]
    choice = Winner("direct", {"direct": 1.0, "other": 2.0})

    def add(number: int) -> None:
        for batch in range(5):
            files[number].add("setting", f"operation {number}", batch, choice)

    with ThreadPoolExecutor(len(files)) as pool:
        list(pool.map(add, range(len(files))))
    own = AutotunerFile("some CPU")
    for number in range(len(files)):
        for batch in range(5):
            assert own.find("setting", f"operation {number}", batch, ["direct", "other"]) == choice
    assert own.count() == 5 * len(files)
    assert [*cache.iterdir()] == [own.path]


def test_the_file_is_in_the_users_cache_and_of_one_cpu_version_and_build(tmp_path, monkeypatch):
    monkeypatch.delenv("PYDTNN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert AutotunerFile("x").path.parent == tmp_path / "xdg" / "pydtnn"
    monkeypatch.setenv("PYDTNN_CACHE", str(tmp_path))
    assert AutotunerFile("x").path.parent == tmp_path
    assert AutotunerFile("x").path != AutotunerFile("y").path
    name = create_backend("cpu").autotuner.file.machine
    assert name.startswith(f"{cpu_model()}, pydtnn {pydtnn.__version__}, kernels ")
