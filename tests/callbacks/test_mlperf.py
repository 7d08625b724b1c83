"""The log of MLPerf training, and what the checker of MLCommons says of it."""

import json

import pytest

from pydtnn.train import main
from tests.other_python import run_with

CHECK = """
import contextlib, io, json, sys
from mlperf_logging.compliance_checker import mlp_compliance
words = ["--usage", "training", "--ruleset", "4.0.0", "--log_output", sys.argv[2], sys.argv[1]]
options = mlp_compliance.get_parser().parse_args(words)
checker = mlp_compliance.make_checker("training", "4.0.0", quiet=True, werror=False)
with contextlib.redirect_stdout(io.StringIO()):
    valid, *_ = mlp_compliance.main(options.filename, "training_4.0.0/common.yaml", checker)
print(json.dumps(bool(valid)))
"""


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mlperf")
    words = ["--model=resnet8", "--epochs=2", "--steps-per-epoch=2", "--batch-size=8"]
    words += ["--quiet", "--seed=5", "--threads=1"]
    data = ["--dataset-options", json.dumps({"samples": 64, "test_samples": 16})]
    places = ["--output-dir", str(folder / "run"), "--mlperf-log", str(folder / "result_0.txt")]
    assert main([*words, *data, *places]) in (0, None)
    return folder / "result_0.txt"


def test_lines_are_those_of_a_run_with_its_epochs(log):
    lines = [json.loads(line.removeprefix(":::MLLOG ")) for line in log.read_text().splitlines()]
    values = {line["key"]: line["value"] for line in lines}
    assert (values["submission_benchmark"], values["seed"]) == ("resnet", 5)
    assert (values["global_batch_size"], values["opt_name"]) == (8, "sgd")
    keys = [line["key"] for line in lines]
    epoch = ["epoch_start", "epoch_stop", "eval_start", "eval_stop", "eval_accuracy"]
    assert keys[-13:] == ["init_stop", "run_start", *epoch, *epoch, "run_stop"]
    numbers = [line["metadata"]["epoch_num"] for line in lines if line["key"] in epoch]
    assert numbers == [1] * 5 + [2] * 5
    assert lines[-1]["metadata"]["status"] == "success"
    times = [line["time_ms"] for line in lines]
    assert times == sorted(times)
    assert 0 <= values["eval_accuracy"] <= 1


def test_the_checker_of_mlcommons_accepts_it(log, tmp_path):
    assert run_with("mlperf_logging", CHECK, log, tmp_path / "checked.log") is True
