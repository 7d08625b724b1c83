"""`--check-equal` and `--tensorboard`: from options to runs on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pydtnn.callbacks import CheckEqual, TensorBoard
from pydtnn.cli.build import create_job
from pydtnn.cli.parser import parse
from pydtnn.comm import Communicator, Serial
from pydtnn.train import main
from tests.each import each
from tests.launch import Finished
from tests.small_run import TINY, TRAIN

# A learning rate of which rank 1 has another one from the fourth step on.
SCHEDULE = """
from mpi4py import MPI

def course(step):
    return 0.01 if step < 3 or MPI.COMM_WORLD.rank != 1 else 0.02
"""


@each(("options", "every"), [([], 100), (["--check-equal=7"], 7), (["--check-equal=0"], None)])
@pytest.mark.threads(2)
def test_ranks_are_compared_unless_it_is_turned_off(
    comm: Communicator, tmp_path: Path, options: list[str], every: int | None
) -> None:
    job = create_job(parse([*TINY, *options]), comm, 1, tmp_path)
    own = [c.every for c in job.trainer._all_callbacks() if isinstance(c, CheckEqual)]
    assert own == ([] if every is None else [every])


@pytest.mark.long
def test_ranks_that_differ_are_named_over_mpi(
    tmp_path: Path, mpiexec: Callable[..., Finished]
) -> None:
    file = tmp_path / "own.py"
    file.write_text(SCHEDULE)
    options = [f"--schedule={file}:course", "--check-equal=2", "--epochs=2"]
    done = mpiexec(3, [*TRAIN, *TINY, *options, f"--output-dir={tmp_path / 'run'}"])
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "CheckEqual" in line]
    assert line.startswith(
        "CheckEqual: expected the same number of updates or learning rate on all ranks, got "
        "another one on rank 1 since step 4: 1 of 2 elements differs, by at most 0.01 (0.01 on "
        "rank 0, 0.02 on rank 1), and "
    )
    assert line.endswith("continue from a checkpoint of step 2 or an earlier one")


def test_a_comparison_where_ranks_differ_by_design_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--scheme=local-sgd", "--check-equal=5", f"--output-dir={tmp_path / 'run'}"]
    assert main([*TINY, *options]) == 1
    assert "check_equal requires the same parameters on all ranks, got LocalSGD" in (
        capsys.readouterr().err
    )


def test_tensorboard_writes_to_the_folder_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboardX", reason="the extra tensorboard is not installed")
    options = ["--tensorboard", "--tensorboard-histograms=2", "--epochs=1"]
    assert main([*TINY, *options, f"--output-dir={tmp_path / 'run'}"]) == 0
    (file,) = (tmp_path / "run" / "tensorboard").iterdir()
    assert file.stat().st_size > 1000


def test_hyper_parameters_are_the_options_that_affect_results(tmp_path: Path) -> None:
    config = parse([*TINY, "--tensorboard", "--tensorboard-histograms=2"])
    trainer = create_job(config, Serial(), 1, tmp_path).trainer
    (own,) = [c for c in trainer.callbacks if isinstance(c, TensorBoard)]
    assert own.histograms == 2
    assert own.hyper_parameters["epochs"] == config.epochs
    assert own.hyper_parameters["dataset"] == config.dataset
    assert not {"lr", "threads", "output_dir"} & {*own.hyper_parameters}


def test_histograms_require_tensorboard() -> None:
    with pytest.raises(ValueError, match="--tensorboard-histograms requires --tensorboard"):
        parse(["--tensorboard-histograms=2"])
