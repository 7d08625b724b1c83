"""Time to accuracy over ranks: rates are searched for each scheme, and runs are not repeated."""

import sys

from benchmarks import over_ranks


def test_the_rate_that_is_there_first_trains_the_further_seeds(tmp_path, monkeypatch, capsys):
    trained = []

    def train(ranks, way, rate, seed, options):
        trained.append((ranks, way, rate, seed))
        found = {0.15: (3.0, 0.97), 0.3: (2.0, 0.99), 0.6: (1.0, 0.979)}[rate]
        row = dict(zip(("ranks", "way", "rate", "seed", "steps"), (*trained[-1], 8), strict=True))
        return {**row, "seconds": found[0], "waiting": 0.5, "mb": 4.0, "accuracy": found[1]}

    monkeypatch.setattr(over_ranks, "train", train)
    arguments = ["program", f"--results={tmp_path / 'r'}", "--seeds=1", "--ranks", "16", "64"]
    monkeypatch.setattr(sys, "argv", arguments)
    for _ in range(2):  # the second time nothing is trained
        over_ranks.main()
    for way in over_ranks.WAYS:
        searched = [(16, way, rate, 0) for rate in over_ranks.RATES]
        assert [key for key in trained if key[1] == way] == [
            *searched,
            *((ranks, way, 0.3, 1) for ranks in (16, 64)),
        ]
    assert len((tmp_path / "r").read_text().splitlines()) == len(trained)
    assert "64 DiLoCo       0.3 250.000  62.500   0.500" in capsys.readouterr().out


def test_runs_end_at_the_accuracy_in_virtual_time(monkeypatch):
    monkeypatch.setattr(over_ranks, "TARGET", 0.05)
    options = ["--dataset=digits", "--model=whitened_cnn:widths=[4,8]", "--global-batch-size=64"]
    first, again = (over_ranks.train(2, "local SGD", 0.1, 0, options) for _ in range(2))
    assert first == again
    assert first["steps"] == 8
    assert first["accuracy"] >= 0.05
    assert 0 < first["waiting"] < first["seconds"] < 1
