"""The table that ends a run says how ranks summed, and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from pydtnn.cli.build import create_job
from pydtnn.cli.config import TrainConfig
from pydtnn.cli.parallel import choose_allreduce
from pydtnn.cli.report import print_report
from pydtnn.comm import Communicator, run_threads
from pydtnn.comm.schedules import auto
from pydtnn.comm.schedules.rule import VENDOR
from tests.each import each

DATA = {"samples": 512, "classes": 4, "shape": [8, 8, 1]}


def reported(tmp_path: Path, capsys: pytest.CaptureFixture[str], hosts: str, **options: object):
    """Name and value of the lines of a report on a run without a step."""
    config = TrainConfig(model="mlp", dataset_options=DATA, **options)

    def report(comm: Communicator) -> None:
        print_report(create_job(config, choose_allreduce(config, comm), 1, tmp_path))

    run_threads(len(hosts), report, hosts=hosts)
    pairs = (line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line)
    return {name: value.strip() for name, value in pairs}


@each(
    ("hosts", "said"),
    [
        ("ab", "direct, vendor up to 8 KiB: there are 2 hosts of 1 rank"),
        ("aabb", "hierarchical, vendor up to 8 KiB: there are 2 hosts of 2 ranks"),
        ("aa", "vendor: all ranks share a host"),
    ],
)
def test_the_allreduce_of_the_rule_is_reported_with_its_reason(tmp_path, capsys, hosts, said):
    lines = reported(tmp_path, capsys, hosts)
    assert lines["allreduce"] == said
    assert ("buckets" in lines) == (hosts != "aa")


def test_one_rank_has_no_allreduce_to_report(tmp_path, capsys):
    assert "allreduce" not in reported(tmp_path, capsys, "a")


def test_the_allreduce_that_was_asked_for_is_reported_by_its_name(tmp_path, capsys):
    lines = reported(tmp_path, capsys, "aab", allreduce="ring", bucket_bytes=1 << 16)
    assert lines["allreduce"] == "ring"
    assert lines["buckets"].endswith("KiB")
    assert reported(tmp_path, capsys, "aab", allreduce="vendor")["allreduce"] == "vendor"


def test_what_was_fastest_is_reported_where_the_vendor_cannot_sum(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(auto.Auto, "_vendor_sums", lambda self, dtype: False)
    config = TrainConfig(model="mlp", dataset_options=DATA, allreduce="auto")

    def report(comm: Communicator) -> None:
        job = create_job(config, choose_allreduce(config, comm), 1, tmp_path)
        job.trainer.comm.allreduce(job.trainer.model.buckets[0].grads)
        print_report(job)

    run_threads(2, report)
    line = next(s for s in capsys.readouterr().out.splitlines() if s.startswith("allreduce"))
    assert " of float32: " in line
    assert VENDOR not in line
