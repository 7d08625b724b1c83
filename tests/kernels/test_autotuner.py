"""Choosing among algorithms, with candidates that only move a clock."""

from __future__ import annotations

import fcntl
import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pydtnn.kernels import Backend, ConvGeometry, autotuner, create_backend, report
from pydtnn.kernels.autotuner import (
    MAX_BATCH_RATIO,
    MODES,
    ROUNDS,
    Autotuner,
    AutotunerFile,
    Winner,
    fastest,
    nearest,
    rule,
)
from pydtnn.kernels.cpu.conv import candidates

THREE = ("direct", "winograd4", "winograd2")
FLOAT = np.dtype("float32")


def geometry(channels: int = 16, size: int = 8, kernel: int = 3) -> ConvGeometry:
    around = kernel // 2
    return ConvGeometry(
        (size, size), (kernel,) * 2, (1, 1), ((around, around),) * 2, (1, 1), channels, channels
    )


class Machine:
    """A clock, and candidates that take given times, one after another."""

    def __init__(self, **seconds: list[float] | float) -> None:
        self.now = 0.0
        self.seconds = {k: s if isinstance(s, list) else [s] for k, s in seconds.items()}
        self.calls: Counter[str] = Counter()
        self.order: list[str] = []
        self.disturbed: set[str] = set()
        self.switches = 0

    def clock(self) -> float:
        return self.now

    def run(self, name: str) -> None:
        times = self.seconds[name]
        self.now += times[self.calls[name] % len(times)]
        self.calls[name] += 1
        self.order.append(name)
        self.switches += name in self.disturbed


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYDTNN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What the logger was told."""
    caplog.set_level(logging.WARNING, logger="pydtnn.kernels")
    return lambda: [record.getMessage() for record in caplog.records]


def tuner(machine: Machine, mode: str = "measure", setting: str = "avx2, 1 thread") -> Autotuner:
    return Autotuner(
        mode,
        setting,
        file=AutotunerFile("some CPU"),
        clock=machine.clock,
        disturbances=lambda: machine.switches,
    )


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


# -- choosing by times


@pytest.mark.parametrize(("share", "chosen"), [(0.99, "direct"), (0.975, "direct"), (0.9, "other")])
def test_the_first_candidate_stays_unless_another_is_clearly_faster(
    share: float, chosen: str
) -> None:
    assert fastest({"direct": 1.0, "other": share, "third": 2.0}, "third") == chosen


def test_where_a_time_is_missing_the_rule_decides(cache: Path) -> None:
    machine = Machine(direct=1.0, winograd4=2.0, winograd2=0.5)
    machine.disturbed = {"direct"}
    own = tuner(machine)
    assert pick(own, machine) == rule(geometry(), THREE) == "winograd4"
    (told,) = own.report().values()
    assert told == "winograd4, by rule, as the machine was too busy for measuring"
    machine.disturbed = set()
    again = tuner(machine)  # the file holds that, too: the same bytes as before
    assert pick(again, machine) == "winograd4"
    assert again.report() == own.report()


# -- keys


def test_a_key_is_measured_once(cache: Path) -> None:
    machine = Machine(direct=1.0, winograd4=0.5, winograd2=0.7)
    own = tuner(machine)
    assert {pick(own, machine) for _ in range(5)} == {"winograd4"}
    assert machine.calls["direct"] == 1 + ROUNDS[0]
    assert own.resolved == {("forward", geometry(), 64, FLOAT): "winograd4"}


def test_operations_geometries_dtypes_and_very_different_batches_are_measured_apart(
    cache: Path,
) -> None:
    machine = Machine(direct=1.0, winograd4=0.5, winograd2=0.7)
    own = tuner(machine)
    pick(own, machine)
    pick(own, machine, operation="backward_data")
    pick(own, machine, where=geometry(32))
    pick(own, machine, batch=64 * MAX_BATCH_RATIO + 1)
    own.pick("forward", geometry(), 64, np.dtype("float64"), THREE, machine.run)
    assert machine.calls["direct"] == 5 * (1 + ROUNDS[0])
    assert len(own.resolved) == 5


def test_a_similar_batch_takes_the_choice_of_the_nearest(cache: Path) -> None:
    machine = Machine(direct=1.0, winograd4=0.5, winograd2=0.7)
    own = tuner(machine)
    pick(own, machine)
    before = machine.now
    for batch in (64 * MAX_BATCH_RATIO, 64 // MAX_BATCH_RATIO, 63):
        assert pick(own, machine, batch=batch) == "winograd4"
    assert machine.now == before


@pytest.mark.parametrize(("batch", "near"), [(1, 4), (8, 4), (9, 16), (16, 16), (10**6, 16)])
def test_the_nearest_batch_is_that_of_the_smallest_ratio(batch: int, near: int) -> None:
    assert nearest([16, 4], batch) == near
    assert nearest([], batch) is None
    assert nearest([0, -3], batch) is None


def test_without_an_alternative_or_a_sample_nothing_is_measured(cache: Path) -> None:
    machine = Machine(direct=1.0, winograd4=0.5)
    own = tuner(machine)
    assert pick(own, machine, candidates=("direct",)) == "direct"
    assert pick(own, machine, batch=0) == "direct"
    assert machine.order == []
    assert not cache.exists()


def test_what_the_text_of_a_geometry_says_is_all_that_two_can_differ_in() -> None:
    plain = geometry()
    others = [
        replace(plain, size=(8, 9)),
        replace(plain, kernel=(3, 1)),
        replace(plain, stride=(2, 1)),
        replace(plain, padding=((1, 1), (0, 1))),
        replace(plain, padding=((0, 0), (0, 0))),
        replace(plain, padding=((2, 2), (2, 2))),
        replace(plain, dilation=(1, 2)),
        replace(plain, channels=8),
        replace(plain, filters=8),
        replace(plain, groups=2),
        replace(plain, size=(8,), kernel=(3,), stride=(1,), padding=((1, 1),), dilation=(1,)),
    ]
    assert str(plain) == "3x3 16->16 on 8x8 padding 1"
    assert len({str(g) for g in [plain, *others]}) == len({plain, *others}) == 1 + len(others)


# -- modes


def test_direct_algorithms_are_taken_where_they_are_asked_for() -> None:
    machine = Machine()
    assert pick(tuner(machine, "direct"), machine) == "direct"


@pytest.mark.parametrize(
    ("channels", "size", "chosen"),
    [(16, 8, "winograd4"), (8, 8, "direct"), (512, 4, "winograd4"), (512, 3, "winograd2")]
    + [(16, 2, "winograd2"), (16, 1, "direct")],
)
def test_the_rule_wants_some_channels_and_a_map_that_tiles_fit_on(
    channels: int, size: int, chosen: str
) -> None:
    machine = Machine()
    own = tuner(machine, "fixed")
    where = geometry(channels, size)
    assert pick(own, machine, where=where) == chosen
    assert pick(own, machine, where=where, operation="backward_filter") == chosen
    assert rule(where, ("direct", "gemm")) == "direct"


@pytest.mark.parametrize(
    ("kernel", "channels", "size", "chosen"),
    [(7, 3, 224, "polyphase"), (5, 16, 16, "polyphase"), (7, 3, 14, "direct")]
    + [(3, 64, 56, "direct")],
)
def test_the_rule_wants_large_filters_for_a_stride_of_2(
    kernel: int, channels: int, size: int, chosen: str
) -> None:
    around = ((kernel // 2, kernel // 2),) * 2
    where = ConvGeometry((size, size), (kernel,) * 2, (2, 2), around, (1, 1), channels, 64)
    assert candidates(where) == ("direct", "polyphase")
    assert rule(where, candidates(where)) == chosen


@pytest.mark.parametrize(
    ("kernel", "channels", "size", "chosen"),
    [((1, 7), 16, 5, "winograd5"), ((7, 1), 16, 4, "direct"), ((1, 7), 8, 17, "direct")]
    + [((1, 5), 16, 8, "winograd4"), ((5, 5), 16, 3, "direct"), ((3, 1), 16, 4, "winograd4")],
)
def test_the_rule_wants_maps_of_whole_tiles_for_lines_and_for_5x5(
    kernel: tuple[int, int], channels: int, size: int, chosen: str
) -> None:
    around = tuple((k // 2, k // 2) for k in kernel)
    where = ConvGeometry((size, size), kernel, (1, 1), around, (1, 1), channels, 16)
    assert rule(where, candidates(where)) == chosen


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("mode", ["fixed", "direct"])
def test_without_measuring_a_choice_does_not_depend_on_the_threads(mode: str, threads: int) -> None:
    machine = Machine()
    own = tuner(machine, mode, f"avx2, {threads} threads")
    assert pick(own, machine) == {"fixed": "winograd4", "direct": "direct"}[mode]


def test_the_environment_says_how_to_choose_and_the_caller_knows_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for mode in MODES:
        monkeypatch.setenv("PYDTNN_TUNING", mode)
        assert create_backend("cpu").autotuner.mode == mode
        assert create_backend("cpu", tuning="direct").autotuner.mode == "direct"
    monkeypatch.delenv("PYDTNN_TUNING")
    assert create_backend("cpu").autotuner.mode == "measure"


def test_an_unknown_mode_is_answered_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="unknown tuning 'mesure'; did you mean 'measure'"):
        create_backend("cpu", tuning="mesure")
    monkeypatch.setenv("PYDTNN_TUNING", "fix")
    with pytest.raises(ValueError, match="unknown value of PYDTNN_TUNING 'fix'"):
        create_backend("cpu")


def test_the_report_says_what_was_chosen_and_why(cache: Path) -> None:
    machine = Machine(direct=1.0, winograd4=0.5, winograd2=0.7)
    own = tuner(machine)
    pick(own, machine)
    pick(own, machine, batch=40)
    pick(own, machine, where=geometry(kernel=1), candidates=("direct",))
    told = report(replace(create_backend("cpu"), autotuner=own))
    where = "conv.forward 3x3 16->16 on 8x8 padding 1 float32, batch"
    assert told["conv.forward"] == "cpu"
    assert told[f"{where} 64"] == (
        "winograd4, measured: winograd4 500 ms, winograd2 700 ms, direct 1e+03 ms"
    )
    assert told[f"{where} 40"] == "winograd4, as for batch 64"
    assert told["conv.forward 1x1 16->16 on 8x8 float32, batch 64"] == (
        "direct, without an alternative"
    )


def test_measuring_leaves_no_trace_in_what_a_convolution_computes(
    cache: Path, cpu_backend: Backend, rng: np.random.Generator
) -> None:
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


def test_after_freezing_nothing_is_measured(cache: Path) -> None:
    machine = Machine(direct=1.0, winograd4=0.5, winograd2=0.7)
    own = tuner(machine)
    table = {"forward 3x3 16->16 on 8x8 padding 1 float32": {64: Winner("winograd2", {})}}
    own.freeze({str(own.kind): table})
    assert pick(own, machine) == pick(own, machine, batch=1) == "winograd2"
    assert pick(own, machine, where=geometry(32)) == "winograd4"  # by rule
    assert machine.order == []
    assert own.open() == table
    pick(own, machine, where=geometry(32))
    assert machine.order


def test_what_was_agreed_on_comes_back_without_times(cache: Path) -> None:
    machine = Machine(direct=1.0, winograd4=0.5, winograd2=0.7)
    own = tuner(machine)
    pick(own, machine)
    assert own.state() == {}  # nobody has agreed yet
    own.freeze({str(own.kind): own.open(), "another kind": {}})
    slower = Machine(direct=1.0, winograd4=1.5, winograd2=0.7)
    resumed = tuner(slower)
    resumed.load(own.state())
    assert resumed.state() == own.state()
    assert "0.5" not in repr(own.state())
    assert pick(resumed, slower) == "winograd4"
    assert slower.order == []


def test_another_kind_of_machine_measures_for_itself_and_keeps_the_others_choices(
    cache: Path,
) -> None:
    machine = Machine(direct=1.0, winograd4=0.5, winograd2=0.7)
    own = tuner(machine)
    pick(own, machine)
    own.freeze({str(own.kind): own.open()})
    slower = Machine(direct=1.0, winograd4=1.5, winograd2=0.7)
    other = tuner(slower, setting="avx2, 2 threads")
    other.load(own.state())
    assert pick(other, slower) == "winograd2"
    other.freeze({str(other.kind): other.open()})
    assert own.state()["measured"].items() < other.state()["measured"].items()


# -- the file


def test_a_second_process_takes_what_the_first_has_measured(cache: Path) -> None:
    fast = Machine(direct=1.0, winograd4=0.5, winograd2=0.7)
    assert pick(tuner(fast), fast) == "winograd4"
    slow = Machine(direct=1.0, winograd4=2.0, winograd2=0.7)
    own = tuner(slow)
    assert pick(own, slow) == "winograd4"
    assert slow.order == []
    assert "winograd4 500 ms" in next(iter(own.report().values()))


def test_whoever_comes_later_with_other_figures_takes_those_that_are_there(cache: Path) -> None:
    machines = [
        Machine(direct=1.0, winograd4=0.5, winograd2=0.7),
        Machine(direct=1.0, winograd4=2.0, winograd2=0.7),
    ]
    both = [tuner(machine) for machine in machines]
    for own in both:  # each has read the file before the other writes it
        own.file.find("avx2, 1 thread", "", 1, THREE)
    assert [pick(o, m) for o, m in zip(both, machines, strict=True)] == ["winograd4"] * 2


def test_settings_batches_and_machines_do_not_mix(cache: Path) -> None:
    machine = Machine(direct=1.0, winograd4=0.5, winograd2=0.7)
    pick(tuner(machine), machine)
    pick(tuner(machine, setting="avx2, 2 threads"), machine)
    pick(tuner(machine), machine, batch=32)  # in another process nothing is near
    other = Autotuner("measure", "avx2, 1 thread", file=AutotunerFile("other"), clock=machine.clock)
    pick(other, machine)
    assert machine.calls["direct"] == 4 * (1 + ROUNDS[0])
    assert len([*cache.glob("choices-*.json")]) == 2


def test_other_candidates_are_measured_again(cache: Path) -> None:
    machine = Machine(direct=1.0, winograd4=0.5, winograd2=0.7)
    pick(tuner(machine), machine, candidates=THREE[:2])
    machine.seconds["winograd2"] = [0.1]
    assert pick(tuner(machine), machine) == "winograd2"
    before = machine.now
    assert pick(tuner(machine), machine) == "winograd2"
    assert machine.now == before


TIMES = b"""{"machine": "some CPU", "choices": {"s": {"o": {"1": {
    "name": "direct", "seconds": {"direct": %b}}}}}}"""


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\0", b"[]", b"null", b'{"machine": "some CPU", "choices": {"s": {"o": 3}}}']
    + [b'{"machine": "some CPU", "choices": {"s": {"o": {"x": {}}}}}', b'{"machine": "other"}']
    + [TIMES % time for time in (b"1" + 400 * b"0", b'"x"', b"{}")],
)
def test_a_damaged_file_is_told_once_and_written_again(
    content: bytes, cache: Path, quiet: Callable[[], list[str]]
) -> None:
    machine = Machine(direct=1.0, winograd4=0.5, winograd2=0.7)
    own = tuner(machine)
    cache.mkdir()
    own.file.path.write_bytes(content)
    assert pick(own, machine) == "winograd4"
    pick(own, machine, operation="backward_data")
    (told,) = quiet()
    assert told.startswith(f"{own.file.path} is damaged")
    again = tuner(Machine())
    assert pick(again, Machine()) == pick(again, Machine(), operation="backward_data")


def test_a_folder_that_cannot_be_written_is_told_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch, quiet: Callable[[], list[str]]
) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(autotuner, "write_file", refuse)
    machine = Machine(direct=1.0, winograd4=0.5, winograd2=0.7)
    own = tuner(machine)
    assert pick(own, machine) == pick(own, machine, operation="backward_data") == "winograd4"
    (told,) = quiet()
    assert "PYDTNN_CACHE" in told
    assert "read-only" in told


def test_processes_that_measure_at_the_same_time_lose_nothing(cache: Path) -> None:
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
    assert [path for path in cache.iterdir() if path.suffix not in {".json", ".lock"}] == []


def test_a_file_in_the_place_of_the_folder_is_told_once(
    cache: Path, quiet: Callable[[], list[str]]
) -> None:
    cache.write_text("")
    machine = Machine(direct=1.0, winograd4=0.5, winograd2=0.7)
    own = tuner(machine)
    assert pick(own, machine) == pick(own, machine, operation="backward_data") == "winograd4"
    (told,) = quiet()
    assert "PYDTNN_CACHE" in told


def test_a_user_without_a_home_can_train(
    monkeypatch: pytest.MonkeyPatch, quiet: Callable[[], list[str]]
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("PYDTNN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    machine = Machine(direct=1.0, winograd4=0.5, winograd2=0.7)
    own = tuner(machine)
    assert pick(own, machine) == pick(own, machine, operation="backward_data") == "winograd4"
    assert len(quiet()) == 1


def test_the_file_is_in_the_users_cache_unless_a_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYDTNN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert AutotunerFile("x").path.parent == tmp_path / "xdg" / "pydtnn"
    monkeypatch.setenv("PYDTNN_CACHE", str(tmp_path))
    assert AutotunerFile("x").path.parent == tmp_path
    assert AutotunerFile("x").path != AutotunerFile("y").path


def test_a_machine_is_its_cpu_the_version_and_the_build() -> None:
    import pydtnn
    from pydtnn.utils.machine import cpu_model

    cpu = pytest.importorskip("pydtnn.kernels.cpu")
    name = AutotunerFile(cpu.this_machine).machine
    assert name.startswith(f"{cpu_model()}, pydtnn {pydtnn.__version__}, kernels ")
    assert create_backend("cpu").autotuner.file.machine == name


def test_a_stopped_process_that_holds_the_lock_is_waited_for_once_and_not_for_long(
    cache: Path, monkeypatch: pytest.MonkeyPatch, quiet: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(autotuner, "LOCK_TIMEOUT_S", 0.05)
    waits: list[float] = []
    monkeypatch.setattr(autotuner.time, "sleep", waits.append)
    machine = Machine(direct=1.0, winograd4=0.5, winograd2=0.7)
    own = tuner(machine)
    cache.mkdir(parents=True, exist_ok=True)
    with open(own.file.path.with_suffix(".lock"), "a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert pick(own, machine) == "winograd4"
        assert waits
        waits.clear()
        assert pick(own, machine, operation="backward_data") == "winograd4"
        assert not waits
    (told,) = quiet()
    assert "PYDTNN_CACHE" in told
    assert "has been locked by another process for 0.05 s" in told


def test_a_kept_choice_that_is_no_candidate_is_not_taken(cache: Path) -> None:
    seconds = {"direct": 1.0, "other": 2.0}
    AutotunerFile("a CPU").add("setting", "operation", 8, Winner("neither", seconds))
    assert AutotunerFile("a CPU").find("setting", "operation", 8, ["direct", "other"]) is None
