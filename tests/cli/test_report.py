"""The table that ends a run says how ranks summed, and why."""

from __future__ import annotations

from pydtnn.cli.build import create_job
from pydtnn.cli.config import TrainConfig
from pydtnn.cli.parallel import choose_allreduce
from pydtnn.cli.report import print_report
from pydtnn.comm import Communicator, run_threads
from tests.each import each

DATA = {"samples": 512, "classes": 4, "shape": [8, 8, 1]}


def reported(tmp_path, capsys, hosts, **options):
    """Name and value of the lines of a report on a run without a step."""
    config = TrainConfig(model="mlp", dataset_options=DATA, **options)

    def report(comm: Communicator) -> None:
        job = create_job(config, choose_allreduce(config, comm), 1, tmp_path)
        print_report(job)
        assert job.about == {}  # there is no run.json

    run_threads(len(hosts), report, hosts=hosts)
    pairs = (line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line)
    return {name: value.strip() for name, value in pairs}


@each(
    ("hosts", "said"),
    [
        ("ab", "direct, vendor up to 8 KiB: there are 2 hosts of 1 rank"),
        ("aabb", "hierarchical, vendor up to 8 KiB: there are 2 hosts of 2 ranks"),
        ("aa", "vendor: all ranks share a host"),
        ("a", None),
    ],
)
def test_the_allreduce_of_the_rule_is_reported_with_its_reason(tmp_path, capsys, hosts, said):
    lines = reported(tmp_path, capsys, hosts)
    assert lines.get("allreduce") == said


def test_the_allreduce_that_was_asked_for_is_reported_by_its_name(tmp_path, capsys):
    assert reported(tmp_path, capsys, "aab", allreduce="ring")["allreduce"] == "ring"
    assert reported(tmp_path, capsys, "aab", allreduce="vendor")["allreduce"] == "vendor"
