"""`--check-equal`: from options to runs on several ranks."""

import pytest

from pydtnn.callbacks import CheckEqual
from pydtnn.cli.build import create_job
from pydtnn.cli.parser import parse
from pydtnn.train import main
from tests.each import each
from tests.small_run import TINY


@each(("options", "every"), [([], 100), (["--check-equal=7"], 7), (["--check-equal=0"], None)])
@pytest.mark.threads(2)
def test_ranks_are_compared_unless_it_is_turned_off(comm, tmp_path, options, every):
    job = create_job(parse([*TINY, *options]), comm, 1, tmp_path)
    own = [c.every for c in job.trainer._all_callbacks() if isinstance(c, CheckEqual)]
    assert own == ([] if every is None else [every])


def test_a_comparison_where_ranks_differ_by_design_is_refused(tmp_path, capsys):
    options = ["--scheme=local-sgd", "--check-equal=5", f"--output-dir={tmp_path / 'run'}"]
    assert main([*TINY, *options]) == 1
    assert "check_equal requires the same parameters on all ranks, got LocalSGD" in (
        capsys.readouterr().err
    )
