"""Figures that a file describes, and the files of `examples/papers`."""

import csv
import re
from pathlib import Path

import pytest

from pydtnn.tools.perfmodel.oracle.command import main
from tests.each import each

PAPERS = Path(__file__).parents[4] / "examples" / "papers"

SMALL = """title: small
network: mlp
shape: 4,4,1
platform: cpu-10gbit
batch: 32
strategies: [data=4, "data=2,filter=2"]
axes: {bandwidth: [1 Gbit/s, 4 Gbit/s], ranks: [2, 3, 8]}
"""


def draw(folder: Path, text: str, *more: str) -> int:
    (folder / "small.yaml").write_text(text)
    return main(["paper", str(folder / "small.yaml"), *more])


def test_a_panel_for_each_axis_has_its_values_and_all_strategies(tmp_path, capsys):
    files = [str(tmp_path / name) for name in ("out.svg", "out.csv")]
    assert draw(tmp_path, SMALL, "--output", files[0], "--csv", files[1]) == 0
    rows = [*csv.DictReader(Path(files[1]).read_text().splitlines())]
    times = {(r["strategy"], r["value"]): r for r in rows if r["axis"] == "bandwidth"}
    assert len(times) == 4  # in the units of the file
    slow, fast = (
        float(times["data 4", f]["seconds_per_step"]) for f in ("125000000.0", "500000000.0")
    )
    assert slow > fast
    ranks = {(r["strategy"], r["possible"]) for r in rows if r["axis"] == "ranks"}
    assert ("data 3", "True") in ranks
    assert ("data 2 x filter 2", "False") in ranks  # 3 ranks are no multiple of 2
    assert ("data 4 x filter 2", "True") in ranks
    picture, out = Path(files[0]).read_text(), capsys.readouterr().out
    words = ("bandwidth between hosts (Gbit/s)", "data x filter 2", "time of an epoch (s)", "small")
    assert [word for word in words if word not in picture] == []
    assert re.search(r"^data x filter 2 .* - .*s$", out, re.M)


@each(
    ("old", "new", "words"),
    [
        ("title", "titel", "unknown entry 'titel'; did you mean 'title'?"),
        ("batch: 32", "batch: many", "batch must be a whole number"),
        ("batch: 32", "draw: speed-up", "expected either batch or batch_per_rank"),
        ("network: mlp", "network: mlpp", "unknown model 'mlpp'"),
        ("cpu-10gbit", "cpu-10gbi", "unknown platform 'cpu-10gbi'"),
        ("ranks: [", "rank: [", "unknown entry 'axes.rank'; did you mean 'axes.ranks'?"),
        ("1 Gbit/s", "1 Gbit", "axes.bandwidth[0]: expected a number with a unit"),
        ("[2, 3, 8]", "8", "axes.ranks: expected a list, got 8"),
        ("data=4,", "date=4,", "strategies: unknown axis 'date'"),
        ("data=4,", "data,", "strategies must be axes with their ranks"),
        ("data=4,", "data=8,", "small.yaml: strategies: expected different ones for as many"),
        ("data=4,", "data=4, 'filter=1,data=4',", "strategies: expected different ones"),
        ("title: small", "title: small\ndraw: bars", "draw: unknown figure 'bars'"),
        ("title: small", "title: small\nmeasured: [{strategy: data=4, speed_up: 3}]", "draw:"),
        ("{bandwidth: [1 Gbit/s, 4 Gbit/s], ranks: [2, 3, 8]}", "{}", "axes: expected values of"),
    ],
)
def test_what_a_file_cannot_state_is_refused_in_one_sentence(old, new, words, tmp_path, capsys):
    assert old in SMALL
    assert draw(tmp_path, SMALL.replace(old, new), f"--output={tmp_path / 'out.png'}") == 1
    said = capsys.readouterr()
    assert words in said.err
    assert (said.err.count("\n"), [*tmp_path.glob("out*")]) == (1, [])


@pytest.mark.long
@each("name", ["castello", "kahira", "mahon"])
def test_a_figure_of_a_paper_is_drawn_with_points_of_virtual_ranks(name, tmp_path, capsys):
    text = (PAPERS / f"{name}.yaml").read_text()
    changed = {"network": "resnet8", "shape": "16,16,3", "virtual": "2"}
    for entry, value in changed.items():
        text = re.sub(rf"^{entry}: \S+", f"{entry}: {value}", text, flags=re.M)
    text = re.sub(r"ranks: \[.*\]", f"ranks: [2, 4{', 12' * (name == 'mahon')}]", text)
    text = re.sub(r"=(8|2,(\w+)=4)$", lambda m: f"=2,{m[2]}=2" if m[2] else "=4", text, flags=re.M)
    output = tmp_path / "out.svg"
    assert draw(tmp_path, text, "--output", str(output)) == 0
    picture, out = output.read_text(), capsys.readouterr().out
    errors = [float(e) for e in re.findall(r"^mean error ([\d.]+) % at \d+ points?$", out, re.M)]
    assert len(errors) == {"castello": 5, "kahira": 1, "mahon": 3}[name]
    assert max(errors) <= 10
    assert picture.count("mean error") == {"castello": 5, "kahira": 7, "mahon": 3}[name]
    assert "virtual ranks" in picture
    for words in {"kahira": ["limit", "compute"], "mahon": ["measured"]}.get(name, []):
        assert words in picture
    if name == "mahon":
        assert float(re.findall(r"predicted / measured.* ([\d.]+)$", out, re.M)[-1]) < 1.2
