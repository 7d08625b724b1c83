"""The page of a search, in Chromium."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace

import pytest

from pydtnn.tools.search import Trial, make_space, run
from pydtnn.tools.search.page import _parallel, _value, render
from tests.each import each
from tests.tools.report import browser
from tests.tools.report.test_page import COUNT, CUT, ILLEGIBLE

pytest.importorskip("optuna")
pytest.importorskip("jinja2")

SPACE = make_space(
    {
        "lr": {"low": 1e-3, "high": 1.0, "log": True},
        "optimizer": ["sgd", "<b>adamw</b>"],
        "momentum": {"low": 0.5, "high": 0.9, "if": {"optimizer": "sgd"}},
    },
    pruner={"name": "median", "n_startup_trials": 2, "n_warmup_steps": 1},
    trials=12,
)
SECTIONS = ["results", "history", "options", "curves"]


def learn(trial: Trial) -> float:
    """Return a value that depends on the learning rate, after five epochs; one trial is slow."""
    if trial.number == 0:
        time.sleep(0.5)
    if trial.number == 3:
        raise ValueError("no <memory>")
    value = 0.0
    for epoch in range(1, 6):
        value = trial.values["lr"] * epoch / 5 + random.Random(trial.number).random() / 9
        if trial.report(value, epoch, last=epoch == 5):
            break
    return value


def test_a_page_without_trials_says_what_is_missing(tmp_path):
    study = run(
        learn, make_space({"lr": [0.1]}, trials=1, stop={"after": "1 ns"}), tmp_path, show=None
    )
    page = render(SPACE, study)
    assert "no trial has a value" in page
    assert "no trial has reported values of epochs" in page


def test_the_line_of_a_trial_without_an_option_does_not_cross_its_axis(tmp_path):
    study = run(lambda trial: float(trial.number), SPACE, tmp_path, show=None, sampler="random")
    figure = _parallel(SPACE, study.get_trials(), "val_accuracy")
    axis, passed = figure.layout["shapes"][2], []
    for line in figure.data:
        trial = study.trials[int(line["hovertemplate"].partition("<br>")[0].split()[-1])]
        crosses = axis["y0"] <= line["y"][2] <= axis["y1"]
        assert crosses == ("momentum" in trial.params)
        passed.append(not crosses)
    assert {*passed} == {True, False}
    assert "passes below its axis" in figure.caption


def test_the_value_of_a_pruned_trial_is_its_last_report_of_a_single_objective():
    pruned = SimpleNamespace(values=None, intermediate_values={1: 0.5, 3: 0.25, 2: 0.75})
    assert _value(SPACE, pruned) == 0.25
    assert _value(SimpleNamespace(objective=("loss", "time")), pruned) is None


@pytest.mark.long
@each("width", [1280, 400])
def test_the_page_shows_all_that_happened(width, tmp_path):
    study = run(learn, SPACE, tmp_path, show=None)
    states = [one.state.name for one in study.trials]
    assert {"COMPLETE", "PRUNED", "FAIL"} == {*states}
    text = render(SPACE, study)
    assert "<b>adamw</b>" not in text
    page = tmp_path / "search.html"
    page.write_text(text)
    if browser.find() is None:
        pytest.skip("there is no Chromium")
    with browser.browser(tmp_path) as tab:
        tab.open(page, width)
        sections = tab.value("[...document.querySelectorAll('section')].map(s => s.id)")
        drawn = int(tab.value("document.body.dataset.drawn"))
        wide = tab.value("document.documentElement.scrollWidth")
        rows = tab.value("document.querySelectorAll('#results tbody tr').length")
        words = tab.value("document.querySelector('#results p').textContent")
        assert tab.complaints == []
        assert not tab.value(COUNT.format("Plotly.validate(...drawing(f))"))
        assert tab.value(ILLEGIBLE) == []
        assert tab.value(CUT) == []
        assert all(url.startswith(("file:", "data:")) for url in tab.requested)
    assert sections == SECTIONS
    assert drawn == 3
    assert wide <= width
    assert rows == 12
    assert f"{states.count('PRUNED')} pruned" in words
    assert f"Best: trial {study.best_trial.number}" in words
