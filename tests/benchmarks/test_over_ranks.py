"""Time to accuracy over ranks: rates are searched for each scheme, and runs are not repeated."""

from benchmarks import over_ranks


def test_the_rate_that_is_there_first_trains_the_further_seeds(tmp_path, monkeypatch, capsys):
    made, real = [], over_ranks.train

    def train(*key):
        made.append(key[:4])
        found = {0.15: (3.0, 0.97), 0.3: (2.0, 0.99), 0.6: (1.0, 0.979)}[key[2]]
        return {**row, **dict(zip(row, key[:4])), "seconds": found[0], "accuracy": found[1]}  # noqa: B905

    options = ["--dataset=digits", "--model=whitened_cnn:widths=[4]", "--global-batch-size=64"]
    monkeypatch.setattr(over_ranks, "TARGET", 0.05)
    row = real(2, "local SGD", 0.1, 0, options)
    assert 0 < row["waiting"] < row["seconds"] < row["steps"] / 8 == 1
    monkeypatch.undo()
    monkeypatch.setattr(over_ranks, "train", train)
    monkeypatch.setattr("sys.argv", f"a --results={tmp_path / 'r'} --seeds=1 --ranks 16 64".split())
    for _ in range(2):  # the second time nothing is trained
        over_ranks.main()
    searched = [(16, "all-reduce", rate, 0) for rate in over_ranks.RATES]
    assert made[:4] == [*searched, (16, "all-reduce", 0.3, 1)]
    assert (made[-1], len(made)) == ((64, "DiLoCo", 0.3, 1), 20)
    assert "64 DiLoCo       0.3 250.000" in capsys.readouterr().out
