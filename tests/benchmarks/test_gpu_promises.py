"""Promises for a GPU are judged by the numbers that were found: kept, broken or not seen."""

import json

from tests.each import each
from tests.gpu_check.suite import TOOLS


def seen(folder, name):
    from tests.gpu_check.promises import PROMISES

    [promise] = [promise for promise in PROMISES if promise.name.startswith(name)]
    return promise.judge(folder)


def test_nothing_is_kept_of_which_nothing_is_known(tmp_path):
    from tests.gpu_check.promises import PROMISES

    (tmp_path / "steps.json").write_text("{ half")
    assert {promise.judge(tmp_path).verdict for promise in PROMISES} == {"NOT RUN"}


FILE = {"state": "passed", "passed": 3, "on_gpu": 2, "failed": 0, "skipped": 0, "told": []}
FAILED = FILE | {"state": "failed", "failed": 1}
EMPTY = {"state": "empty", "told": ["NCCL 2.28"]}
KERNELS = {"cold": {"add": 0.9}, "failed": {}, "complete": True}


def row(eager, compiled, failed=None):
    ratio = {"eager": eager, "compiled": compiled}
    return {"ratio": {k: v for k, v in ratio.items() if v}, "failed": failed or {}}


def steps(float32, bfloat16=None):
    rows = {"float32": float32, **({"bfloat16": bfloat16} if bfloat16 else {})}
    return {"steps": {f"resnet44-128 {dtype}": value for dtype, value in rows.items()}}


def sides(failed=None, **found):
    names = ("accuracy", "seconds")
    sides = {name: dict(zip(names, values, strict=True)) for name, values in found.items()}
    return {"cifar": {"epochs": 12, "sides": sides, "failed": failed or {}}}


def kernels(**changes):
    return {"kernels": {"memory": {"float32": KERNELS | changes}}}


EAGER, COMPILED = (f"ResNet-44, batch 128, to {peer}" for peer in ("eager", "compiled"))
RECIPE = "ResNet-44 on CIFAR-10"


@each(
    ("files", "promise", "verdict", "words"),
    [
        ({"tests": {"a": FILE}}, "test suite", "PASS", "3 tests passed"),
        ({"tests": {"a": FILE, "b": FAILED}}, "test suite", "FAIL", "tests b"),
        ({"tests": {"a": FILE | {"on_gpu": 0}}}, "test suite", "NOT RUN", "used a GPU"),
        ({tool: {"a": FILE} for tool in TOOLS}, "compute", "PASS", ""),
        ({"nccl2": {"a": EMPTY}, "staged2": {"a": FILE}}, "two ranks", "PASS", "NCCL 2.28"),
        ({"nccl2": {"a": FAILED}, "staged2": {"a": FILE}}, "two ranks", "FAIL", ""),
        (steps(row(2.6, 1.2), row(2.5, 1.1)), EAGER, "PASS", ""),
        (steps(row(2.6, 1.2), row(2.5, 1.1)), COMPILED, "PASS", ""),
        (steps(row(2.6, 1.2), row(2.4, 1.2)), EAGER, "FAIL", "bfloat16 2.40"),
        (steps(row(2.6, None, {"compiled": "cannot"}), row(3, 2)), COMPILED, "NOT RUN", "cannot"),
        (steps(row(None, None, {"ours": "broke"}), row(3, 2)), EAGER, "FAIL", "broke"),
        (kernels(), "memory-bound", "PASS", "1 of 1"),
        (kernels(cold={"add": 0.9, "relu": 0.84}), "memory-bound", "FAIL", "relu float32 0.84"),
        (kernels(complete=False), "memory-bound", "NOT RUN", ""),
        (sides(ours=(0.900, 9), eager=(0.902, 20)), RECIPE, "PASS", "12 epochs"),
        (sides(ours=(0.900, 9), eager=(0.904, 20)), RECIPE, "FAIL", ""),
        (sides(ours=(0.9, 9), eager=(0.9, 20), compiled=(0.9, 8)), RECIPE, "FAIL", ""),
        (sides({"eager": "not done"}, ours=(0.9, 9)), RECIPE, "NOT RUN", ""),
        (sides({"ours": "status 1"}, eager=(0.9, 20)), RECIPE, "FAIL", "status 1"),
    ],
)
def test_promises_are_kept_broken_or_not_seen(tmp_path, files, promise, verdict, words):
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    found = seen(tmp_path, promise)
    assert found.verdict == verdict
    assert words in found.figure
