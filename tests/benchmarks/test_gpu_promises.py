"""Promises for a GPU are judged by the numbers that were found: kept, broken or not seen."""

from __future__ import annotations

import json

from tests.each import each


def results(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def seen(folder, name):
    from tests.gpu_check.promises import PROMISES

    [promise] = [promise for promise in PROMISES if promise.name.startswith(name)]
    return promise.judge(folder)


def test_nothing_is_kept_of_which_nothing_is_known(tmp_path):
    from tests.gpu_check.promises import PROMISES

    (tmp_path / "steps.json").write_text("{ half")
    assert {promise.judge(tmp_path).verdict for promise in PROMISES} == {"NOT RUN"}


FILE = {"state": "passed", "passed": 3, "on_gpu": 2, "failed": 0, "skipped": 0, "told": []}


@each(
    ("files", "verdict"),
    [
        ({"a": FILE}, "PASS"),
        ({"a": FILE, "b": FILE | {"state": "failed", "failed": 1}}, "FAIL"),
        ({"a": FILE, "b": {"state": "not done"}}, "NOT RUN"),
        ({"a": FILE | {"on_gpu": 0}}, "NOT RUN"),
    ],
)
def test_a_suite_passes_if_all_of_it_does_and_some_of_it_on_a_gpu(tmp_path, files, verdict):
    results(tmp_path, tests=files)
    assert seen(tmp_path, "test suite").verdict == verdict


def test_a_sanitizer_that_is_missing_is_not_one_that_found_nothing(tmp_path):
    results(tmp_path, memcheck={"a": FILE}, racecheck={"a": FILE})
    assert seen(tmp_path, "compute-sanitizer").verdict == "NOT RUN"
    results(tmp_path, synccheck={"a": FILE})
    assert seen(tmp_path, "compute-sanitizer").verdict == "PASS"


def test_two_ranks_may_talk_in_either_way(tmp_path):
    results(tmp_path, nccl2={"a": {"state": "empty", "told": ["NCCL 2.28"]}}, staged2={"a": FILE})
    verdict, figure = seen(tmp_path, "two ranks")
    assert verdict == "PASS"
    assert "NCCL 2.28" in figure
    results(tmp_path, nccl2={"a": FILE | {"state": "failed", "failed": 1}})
    assert seen(tmp_path, "two ranks").verdict == "FAIL"


def row(eager, compiled, failed=None):
    ratio = {"eager": eager, "compiled": compiled}
    return {"ratio": {k: v for k, v in ratio.items() if v}, "failed": failed or {}}


@each(
    ("rows", "verdicts"),
    [
        ({"float32": row(2.6, 1.2), "bfloat16": row(2.5, 1.1)}, ("PASS", "PASS")),
        ({"float32": row(2.6, 1.2), "bfloat16": row(2.4, 1.2)}, ("FAIL", "PASS")),
        ({"float32": row(2.6, 1.2)}, ("NOT RUN", "NOT RUN")),
        (
            {"float32": row(2.6, None, {"compiled": "cannot"}), "bfloat16": row(3, 2)},
            ("PASS", "NOT RUN"),
        ),
        (
            {"float32": row(None, None, {"ours": "broke"}), "bfloat16": row(3, 2)},
            ("FAIL", "FAIL"),
        ),
        ({"float32": row(float("nan"), 2), "bfloat16": row(3, 2)}, ("FAIL", "PASS")),
    ],
)
def test_ratios_must_all_be_there_and_large_enough(tmp_path, rows, verdicts):
    results(tmp_path, steps={f"resnet44-128 {dtype}": value for dtype, value in rows.items()})
    names = ("ResNet-44, batch 128, to eager", "ResNet-44, batch 128, to compiled")
    assert tuple(seen(tmp_path, name).verdict for name in names) == verdicts
    if "compiled" in rows["float32"]["failed"]:
        assert "cannot" in seen(tmp_path, names[1]).figure


@each(
    ("table", "verdict"),
    [
        ({"cold": {"add": 0.9}, "failed": {}, "complete": True}, "PASS"),
        ({"cold": {"add": 0.9, "relu": 0.84}, "failed": {}, "complete": True}, "FAIL"),
        ({"cold": {"add": 0.9}, "failed": {"relu": "broke"}, "complete": True}, "FAIL"),
        ({"cold": {"add": 0.9}, "failed": {}, "complete": False}, "NOT RUN"),
    ],
)
def test_every_kernel_must_reach_the_bandwidth(tmp_path, table, verdict):
    results(tmp_path, kernels={"memory": {"float32": table}})
    assert seen(tmp_path, "memory-bound").verdict == verdict


def side(accuracy, seconds):
    return {"accuracy": accuracy, "seconds": seconds, "first": 1.0, "evaluation": 1.0}


@each(
    ("sides", "failed", "verdict"),
    [
        ({"ours": side(0.900, 9), "eager": side(0.902, 20)}, {}, "PASS"),
        ({"ours": side(0.900, 9), "eager": side(0.904, 20)}, {}, "FAIL"),
        ({"ours": side(0.9, 9), "eager": side(0.9, 20), "compiled": side(0.9, 8)}, {}, "FAIL"),
        ({"ours": side(0.9, 9), "eager": side(0.9, 20)}, {"compiled": "broke"}, "PASS"),
        ({"ours": side(0.9, 9)}, {"eager": "not done"}, "NOT RUN"),
        ({"eager": side(0.9, 20)}, {"ours": "status 1"}, "FAIL"),
    ],
)
def test_accuracy_and_time_are_both_compared(tmp_path, sides, failed, verdict):
    results(tmp_path, cifar={"epochs": 12, "sides": sides, "failed": failed})
    assert seen(tmp_path, "ResNet-44 on CIFAR-10").verdict == verdict
