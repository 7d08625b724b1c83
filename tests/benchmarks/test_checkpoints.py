"""The study of checkpoints, of a small network."""

import json

import pytest

from benchmarks.checkpoints import __main__ as study
from benchmarks.checkpoints import resuming, scale
from tests.each import each


def test_the_study_writes_a_page_of_formats_and_of_damaged_files(tmp_path):
    places = tmp_path / "places"
    places.mkdir()
    page, records = tmp_path / "page.html", tmp_path / "records.jsonl"
    study.main(
        [
            *("--networks", "mlp", "--examine", "mlp", "--ranks", "1", "--turns", "1"),
            *("--places", f"here={places}", "--flips", "0"),
            *("--output", str(page), "--records", str(records)),
        ]
    )
    found = [json.loads(line) for line in records.read_text().splitlines()]
    times = {one["format"]: one for one in found if one["what"] == "time"}
    assert {"ours", "npz", "npz, compressed"} <= times.keys()
    for one in times.values():
        assert min(one["write"], one["read"], one["bytes"]) > 0
    assert times["ours"]["bytes"] == pytest.approx(times["npz"]["bytes"], rel=0.05)
    damaged = {one["format"]: one for one in found if one["what"] == "bytes"}
    assert damaged["ours"]["same"]
    assert damaged["ours"]["flips"] == {"error": 10}
    assert damaged["ours"]["cut"] == "error"
    assert "<h2>mlp, here</h2>" in page.read_text()
    assert [*places.iterdir()] == []


def test_flipped_bits_of_a_network_that_has_learnt(monkeypatch):
    monkeypatch.setattr(resuming, "BITS", {"highest": 30, "lowest": 0})
    monkeypatch.setattr(resuming, "MORE", 4)
    rows = {(row["place"], row["bit"]): row for row in resuming.flips(3)}
    (undisturbed,) = rows["none", "none"]["before"]
    assert 0.5 < undisturbed < 1
    assert rows["weights", "lowest"]["before"] == pytest.approx([undisturbed] * 3, abs=0.01)
    assert min(rows["weights", "highest"]["before"]) < undisturbed - 0.2
    assert rows["momentum", "highest"]["before"] == [undisturbed] * 3  # before the first step
    assert len(rows["weights", "highest"]["after"]) <= 3


@each("nbytes", [205e6, 2.1e12])
def test_the_best_interval_takes_the_smallest_share_of_time(nbytes):
    for level, shares in scale.shares(nbytes).items():
        best = shares["auto"].share
        assert best <= 1.02 * min(share.share for share in shares.values()), level
    at_once, beside = (
        scale.shares(nbytes)[f"shared, {when}"]["auto"] for when in ("at once", "in the background")
    )
    assert beside.share < at_once.share
