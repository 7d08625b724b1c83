"""`benchmarks.evaluation`: plans, statistics, and a run of our own adapter."""

import json
import os
import signal
import subprocess
import sys
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from benchmarks.comm.cluster_launch import why_not
from benchmarks.common.pages import median
from benchmarks.common.processes import descendants, lives
from benchmarks.evaluation import statistics
from benchmarks.evaluation.__main__ import PLANS, main
from benchmarks.evaluation.frameworks import COSTS, FRAMEWORKS, interpreter
from benchmarks.evaluation.networks import NETWORKS, parameters
from benchmarks.evaluation.observations import time_to
from benchmarks.evaluation.plan import Plan
from benchmarks.evaluation.running import counter_of, disturbance
from benchmarks.evaluation.traces import RULES, Traced, read_profile, states_of
from pydtnn.tools.tracing.analysis.states import State
from tests.each import each
from tests.ranks import wait_for

SMALL = """frameworks: [pydtnn]
networks: [mlp]
ranks: [1]
batch: 4
steps: 3
warm_up: 1
traced: 2
repetitions: 2
"""


def write(path: Path, text: str = SMALL) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_the_shipped_plan_has_what_the_protocol_asks_for():
    plan = Plan.load(PLANS / "default.yaml")
    assert len(plan.networks) >= 3
    assert plan.ranks == (1, 2)
    assert len(plan.frameworks) >= 4
    assert plan.repetitions >= 5
    cells = [*plan.cells()]
    assert len(set(cells)) == len(cells)
    blocks = [[c for c in cells if c.repetition == r] for r in range(plan.repetitions)]
    assert len({tuple(c[1:] for c in block) for block in blocks}) == plan.repetitions  # orders
    assert len({frozenset(c[1:] for c in block) for block in blocks}) == 1
    assert [*plan.cells()] == cells
    changes = sum(one[2:] != other[2:] for one, other in pairwise(blocks[0]))
    assert changes == len(plan.networks) * len(plan.ranks) - 1  # compared runs follow each other
    for path in PLANS.glob("*.yaml"):
        assert bool(Plan.load(path).link) == ("cluster" in path.name)


@each(
    ("change", "words"),
    [
        (("[pydtnn]", "[pydtn]"), "unknown framework 'pydtn'; did you mean 'pydtnn'"),
        (("[mlp]", "[]"), "networks: expected a list"),
        (("steps: 3", "stpes: 3"), "did you mean 'steps'"),
        (("steps: 3", "steps: many"), "steps: expected a whole number from 1, got 'many'"),
        ((SMALL, "1"), "expected entries"),
        (("batch: 4", "batch: 4\nepochs: 2"), "expected both `data` and `epochs`"),
        (("ranks: [1]", "ranks: [3]\nstrong: true"), "expected a multiple of 3 ranks, got 4"),
        (("[mlp]", "[mlp]\ndata: digits\nepochs: 1"), "expected a network for samples of digits"),
        (("[mlp]", "[resnet20]\ndata: digits\nepochs: 1"), "expected networks without batch norm"),
        (("batch: 4", "hosts: 2"), "expected a rate such as 1gbit"),
        (("ranks: [1]", "ranks: [3]\nhosts: 2\nlink: 1gbit"), "as many on each of 2 hosts, got 3"),
    ],
)
def test_a_bad_plan_is_refused_in_one_sentence(tmp_path, capsys, change, words):
    path = write(tmp_path / "plan.yaml", SMALL.replace(*change))
    assert main(["run", str(path), "--output", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_nothing_is_downloaded_unless_it_is_asked_for(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("subprocess.run", None)
    plan = write(tmp_path / "plan.yaml", SMALL.replace("[pydtnn]", "[pydtnn, jax]"))
    out, environments = tmp_path / "out", tmp_path / "env"
    arguments = ["run", str(plan), "--output", str(out), "--environments", str(environments)]
    size, minutes = COSTS["jax"]
    packages = f"jax==0.10.2, optax, numpy in {environments / 'jax'}"
    packages += f" (about {size} MB, {minutes} min)"
    assert {one.environment for one in FRAMEWORKS.values() if one.packages} == {*COSTS}
    assert main(arguments) == 1
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: print(question) or "n")
    assert main(arguments) == 1
    assert capsys.readouterr().out == f"install {packages}? [y/N] \n"
    assert main(arguments) == 1
    assert f"got none for {packages}; add --install" in capsys.readouterr().err
    assert main([*arguments, "--dry-run"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].endswith(f" runs of pydtnn, jax in {out}")
    assert printed[1].endswith(packages)
    assert {*tmp_path.iterdir()} == {plan}


# -- statistics -----------------------------------------------------------------------------------


def times(rng: np.random.Generator, factor: float = 1.0) -> tuple[list[float], list[float]]:
    """Return times of two programs in 5 repetitions of 6 cells, with noise."""
    cells = np.exp(rng.normal(0, 1, 6))
    repetitions = np.exp(rng.normal(0, 0.02, 5))  # the machine is slower or faster for both
    both = np.multiply.outer(repetitions, cells).ravel()
    first, second = (both * np.exp(rng.normal(0, 0.01, 30)) for _ in range(2))
    return [*(factor * first)], [*second]


def test_a_program_that_is_3_percent_slower_is_found_and_equal_ones_are_not():
    rng = np.random.default_rng(0)
    for _ in range(20):
        slower = statistics.compare(*times(rng, 1.03))
        assert slower.significant
        assert slower.ratio.low < 1.03 < slower.ratio.high or abs(slower.ratio.value - 1.03) < 0.01
        assert not statistics.compare(*times(rng)).significant


def test_less_than_three_values_have_no_interval_and_less_than_five_pairs_no_test():
    assert median([3.0]).text() == statistics.mean([3.0]).text() == "3"
    assert median([3.0, 4.0]).text() == statistics.mean([3.0, 4.0]).text() == "3.5"
    assert "to" in median([3.0, 4.0, 5.0]).text()
    few = statistics.compare([31.92] * 4, [1.0] * 4)
    assert np.isnan(few.p)
    assert not few.significant
    assert statistics.compare([31.92] * 5, [1.0] * 5).p == 2 / 2**5
    assert statistics.detectable([([1.0, 1.1], [1.0, 1.0])], 10) == np.inf
    assert statistics.compare([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]).ratio == (1.0, 1.0, 1.0)
    assert statistics.compare_cells([([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])] * 2).p == 1
    values = statistics.mean(np.arange(5.0))
    assert values.high - values.value == pytest.approx(stats.t.ppf(0.975, 4) * np.sqrt(2.5 / 5))


def test_a_p_is_the_share_of_all_choices_of_signs():
    values = np.random.default_rng(7).normal(size=8)
    sums = [abs(np.dot(values, signs)) for signs in product((1, -1), repeat=8)]
    assert statistics.sign_test(values) == np.mean(np.array(sums) >= abs(values.sum()) * (1 - 1e-9))


@pytest.mark.long
@each("number", [1, 2, 3, 5, 10])
def test_equal_programs_are_called_different_at_most_at_the_nominal_rate(number, monkeypatch):
    """Steps of 1 ms to 1 s, noise of 0.1 to 10 % with outliers, and a machine of changing speed."""
    monkeypatch.setattr(statistics, "STEPS", 1000)  # the test is exact for rounded values
    for pairs in (1, 2, 3, 5, 10):
        rng = np.random.default_rng(100 * number + pairs)
        p = []
        for _ in range(1000):
            steps, spreads = 10 ** rng.uniform([[-3], [-3]], [[0], [-1]], (2, number))
            machine = rng.lognormal(0, 0.1, (number, pairs))
            noise = spreads[:, None] * rng.standard_t(3, (2, number, pairs))
            first, second = steps[:, None] * machine * np.exp(noise)
            p.append(statistics.compare_cells([*zip(first, second, strict=True)]).p)
        for rate in (statistics.SIGNIFICANT, 0.01, 0.05):
            alarms = np.count_nonzero(np.array(p) < rate)
            assert alarms <= stats.binom.ppf(1 - 1e-6, 1000, rate)  # of 25 cells and 3 rates


def spread(rng: np.random.Generator, deviation: float, pairs: int, factor: float = 1.0) -> tuple:
    """Return times whose ratios have exactly this deviation, if `factor` is 1; else on average."""
    own = rng.standard_normal(pairs)
    own *= deviation / (own.std(ddof=1) if factor == 1 else 1)
    return factor * np.exp(own), np.ones(pairs)


def test_eleven_pairs_find_a_ratio_if_all_have_its_sign():
    least = statistics.detectable([spread(np.random.default_rng(0), 0.01, 11)])
    assert np.log(least) == pytest.approx(0.01 * stats.norm.ppf(0.8 ** (1 / 11)), rel=0.05)


@pytest.mark.long
@each("pairs", [(15,), (5,) * 6])
def test_a_ratio_that_a_plan_can_find_is_found_four_times_of_five(pairs):
    rng, deviations = np.random.default_rng(3), 0.01 * np.arange(1, len(pairs) + 1)
    cells = [*zip(deviations, pairs, strict=True)]
    least = statistics.detectable([spread(rng, *cell) for cell in cells])
    found = [
        statistics.compare_cells([spread(rng, *cell, least) for cell in cells]).significant
        for _ in range(400)
    ]
    assert np.mean(found) == pytest.approx(statistics.POWER, abs=0.08)  # of 200 and 400 draws


def test_variation_is_that_of_jains_example():
    """Jain, example 18.1: memory and cache at two levels each, 3 replications."""
    observed = {("-", "-"): (15, 18, 12), ("+", "-"): (45, 48, 51), ("-", "+"): (25, 28, 19)}
    observed[("+", "+")] = (75, 75, 81)
    shares = statistics.variation(observed, ("memory", "cache"))
    effects = {"memory": 21.5, "cache": 9.5, "memory x cache": 5.0}  # q_A, q_B, q_AB
    total = 12 * sum(effect**2 for effect in effects.values()) + 102  # SSE
    for name, effect in effects.items():
        assert shares[name] == pytest.approx(12 * effect**2 / total)
    assert shares["error"] == pytest.approx(102 / total)
    del observed["+", "+"]
    with pytest.raises(ValueError, match="every combination"):
        statistics.variation(observed, ("memory", "cache"))


# -- traces ---------------------------------------------------------------------------------------


def profile(path: Path, begin: float, *events: tuple[str, int, float, float]) -> Path:
    """Write a profile; times in us from the origin of the profiler."""
    marks = [("step", 1, begin, 100.0), *events]
    keys = ("name", "tid", "ts", "dur")
    found = [{"ph": "X", **dict(zip(keys, event, strict=True))} for event in marks]
    found.append({"ph": "M", "name": "thread_name", "tid": 1, "args": {"name": "python"}})
    path.write_text(json.dumps({"traceEvents": found}))
    return path


def test_a_profile_of_pytorch_becomes_the_states_of_its_ranks(tmp_path):
    events = [
        [("backward", 1, 0, 50), ("aten::mm", 1, 0, 40), ("gloo:all_reduce", 2, 30, 40)],
        [("aten::mm", 1, 1010, 40), ("gloo:all_reduce", 2, 1050, 20)],  # a clock of its own
    ]
    profiles = [
        read_profile(profile(tmp_path / f"{rank}.json", begin, *own), RULES["torch_ddp"], [10**15])
        for rank, begin, own in ((0, 0.0, events[0]), (1, 1000.0, events[1]))
    ]
    states = states_of(profiles)
    # Rank 0 computes until 40, from 30 on with a sum in progress, which the other one begins at 50.
    names = (State.COMPUTE, State.OVERLAP, State.WAITING, State.COMMUNICATION)
    found = [[1e6 * one.seconds[name] for name in names] for one in states]
    assert found == [pytest.approx([30 + 30, 10, 10, 20]), pytest.approx([50 + 30, 0, 0, 20])]
    steps = np.stack([one.steps for one in profiles], axis=-1)
    bars = Traced(steps, states).picture(200e3)
    assert bars[1].count("<rect") == 3
    assert '<rect x="0" width="150" height="1" fill="#3b6fb6"/>' in bars[1]  # 50 of 200 us
    event = {"pid": 1, "ts": 60}
    timeline = [{"args": {"start_time_since_epoch_in_micros": 10**12}}]  # Horovod's
    timeline += [event | {"name": "MPI_ALLREDUCE"}, event | {"ts": 70}]
    (tmp_path / "timeline.json").write_text(json.dumps(timeline))
    read = read_profile(tmp_path / "0.json", RULES["horovod_torch"], [10**15])
    assert read.sums.tolist() == [[10**15 + 60_000, 10**15 + 70_000]]


# -- runs -----------------------------------------------------------------------------------------


def test_a_run_is_disturbed_by_what_it_has_not_used_itself():
    ticks = os.sysconf("SC_CLK_TCK")
    before = {"at": 0.0, "busy": 0, "steal": 0, "all": 0}
    after = {"at": 10.0, "busy": 16 * ticks, "steal": ticks, "all": 20 * ticks}
    found = disturbance(before, after, own=10.0)
    assert found == {"load": pytest.approx(0.5), "steal": pytest.approx(0.05)}
    assert disturbance(before, after, own=20.0)["load"] == 0


def test_a_plan_runs_continues_and_is_reported(tmp_path, capsys):
    plan, out = write(tmp_path / "plan.yaml"), tmp_path / "out"
    arguments = ["run", str(plan), "--output", str(out)]
    assert main(arguments) == 0
    lines = (out / "runs.jsonl").read_text().splitlines()
    assert len(lines) == 2
    runs = [json.loads(line) for line in lines]
    assert runs[0]["losses"] == runs[1]["losses"]
    assert len(runs[0]["times"]) == 4
    assert all(time > 0 for time in runs[0]["times"])
    (out / "runs.jsonl").write_text(lines[0] + "\n" + lines[1][:40])  # interrupted
    assert main(["report", str(out)]) == 0
    assert (out / "report.md").read_text().splitlines()[2] == "- incomplete: 1 of 2 runs"
    capsys.readouterr()
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("   2 of 2")
    report = (out / "report.md").read_text()
    assert "incomplete" not in report
    for words in ("mlp (1.86 M parameters), 1 rank", "| pydtnn |", "Losses of the first", "%"):
        assert words in report
    assert "<svg" in (out / "report.html").read_text()
    rows = (out / "observations.csv").read_text().splitlines()
    assert rows[0] == "repetition,framework,network,ranks,response,step,value,unit"
    assert sum(",time of a step," in row for row in rows) == 6
    page = (out / "traces.html").read_text()
    assert "mlp, 1 rank:" in page
    assert page.count('<span>rank 0</span><svg viewBox="0 0 600 1"') == 1
    write(plan, SMALL.replace("steps: 3", "steps: 4"))
    assert main(arguments) == 1
    assert "of another plan" in capsys.readouterr().err
    older = {name: value for name, value in runs[0].items() if name != "accuracy"}
    (out / "runs.jsonl").write_text(json.dumps(older) + "\n")
    assert main(["report", str(out)]) == 1
    assert "a run has no 'accuracy': an earlier version wrote it" in capsys.readouterr().err


SENDER = """import ctypes, os, socket
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
client.sendall(bytes(1000))
client.sendmsg([b"ab", b"c"])
os.write(client.fileno(), b"hello")
os.writev(client.fileno(), [b"1", b"2"])
inside, end = socket.socketpair()
inside.send(b"not through TCP")
print("a line")
own = ctypes.CDLL(None)
print(own.sent_messages(), own.sent_bytes())
"""


@each("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_no_process_behind(tmp_path, number):
    plan = write(tmp_path / "plan.yaml", SMALL.replace("steps: 3", "steps: 100000"))
    words = ["-m", "benchmarks.evaluation", "run", str(plan), "--output", str(tmp_path / "out")]
    run = subprocess.Popen([sys.executable, *words])
    wait_for(lambda: len(descendants(run.pid)) >= 3)  # mpirun, its proxy, a rank
    started = descendants(run.pid)
    run.send_signal(number)
    run.wait(300)
    wait_for(lambda: not any(map(lives, started)))


def test_a_shim_that_does_not_start_is_no_interpreter(tmp_path, monkeypatch):
    for name, text in (("shim", "exit 127"), ("real", "exit 0")):
        write(tmp_path / name / "python9", f"#!/bin/sh\n{text}\n").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/shim:{tmp_path}/real")
    assert interpreter("python9") == f"{tmp_path}/real/python9"
    assert interpreter("python8") is None


def test_messages_through_tcp_are_counted_and_nothing_else(tmp_path):
    counter = counter_of(tmp_path)
    if not counter:
        pytest.skip("no C compiler")
    done = subprocess.run(
        [sys.executable, "-c", SENDER], env=os.environ | {"LD_PRELOAD": counter},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "4 1010"


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be emulated")
def test_ranks_on_emulated_hosts_exchange_gradients_over_their_links(tmp_path):
    text = SMALL.replace("ranks: [1]", "ranks: [2]\nhosts: 2\nlink: 1gbit")
    plan = write(tmp_path / "plan.yaml", text.replace("repetitions: 2", "repetitions: 1"))
    out = tmp_path / "out"
    command = [sys.executable, "-m", "benchmarks.evaluation", "run", plan, "--output", out]
    subprocess.run(command, check=True)
    (line,) = (out / "runs.jsonl").read_text().splitlines()
    gradients = 4 * parameters(NETWORKS["mlp"])
    assert gradients < json.loads(line)["link_bytes"] < 1.1 * gradients
    assert "2 ranks on 2 hosts, 1gbit" in (out / "report.md").read_text()


def test_epochs_have_an_accuracy_and_a_planted_slow_down_is_timed(tmp_path):
    text = SMALL.replace("[pydtnn]", "[pydtnn, pydtnn_slower]").replace("[mlp]", "[digits]")
    text = text.replace("batch: 4", "batch: 32\ndata: digits\nepochs: 3\ntarget: 0.5")
    out = tmp_path / "out"
    assert main(["run", str(write(tmp_path / "plan.yaml", text)), "--output", str(out)]) == 0
    runs = [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]
    for run in runs:
        assert len(run["losses"]) == 3 * run["epoch"] == 3 * (1437 // 32)
        assert len(run["accuracy"]) == 3
        assert run["accuracy"][-1] > 0.5
        epochs = next(n for n, one in enumerate(run["accuracy"], start=1) if one >= 0.5)
        assert time_to(run, 0.5) == sum(run["times"][: epochs * run["epoch"]])
        assert time_to(run, 1.1) is None
    by_seed = {(run["repetition"], tuple(run["losses"])) for run in runs}
    assert len(by_seed) == 2  # a seed's losses are the same, those of others are not
    report = (out / "report.md").read_text()
    assert "Accuracy on the test set of digits after 3 epochs" in report
    assert "All networks and ranks together" in report
    assert "| LBANN, MPI | LBANN is not on PyPI" in report
    rows = (out / "observations.csv").read_text().splitlines()
    assert sum(",accuracy," in row for row in rows) == 12
    assert sum(",time to accuracy," in row for row in rows) == 4
