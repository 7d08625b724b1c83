"""Callbacks: what they decide, what they write, and what they show."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.callbacks import (
    BestWeights,
    Callback,
    Checkpointer,
    EarlyStopping,
    HistoryWriter,
    Monitor,
    ProgressBar,
    ReduceOnPlateau,
    StopAtMetric,
)
from pydtnn.checkpoint import find_checkpoints
from pydtnn.comm import Communicator
from pydtnn.errors import AgreedError
from pydtnn.weights import load_weights
from tests.small_training import (
    STEPS,
    Recorder,
    follow,
    small_data,
    small_fit,
    small_model,
    small_trainer,
)

NAN = math.nan


# -- the base class


def test_a_callback_hears_everything_in_order_and_does_nothing_by_default() -> None:
    heard: list[str] = []

    class Listener(Callback):
        def on_fit_start(self, trainer: Any, epochs: int, steps: int) -> None:
            super().on_fit_start(trainer, epochs, steps)
            heard.append(f"fit {epochs}x{steps}")

        def on_epoch_start(self, trainer: Any) -> None:
            super().on_epoch_start(trainer)
            heard.append(f"epoch {trainer.epoch}")

        def on_step_end(self, trainer: Any) -> None:
            super().on_step_end(trainer)
            heard.append(f"step {trainer.step}")

        def on_epoch_end(self, trainer: Any) -> None:
            super().on_epoch_end(trainer)
            heard.append(f"complete {trainer.epoch}")

        def on_fit_end(self, trainer: Any) -> None:
            super().on_fit_end(trainer)
            heard.append("end")

    listener = Listener()
    small_fit(small_trainer(None, listener), epochs=1)
    assert heard == ["fit 1x4", "epoch 0", *(f"step {i}" for i in (1, 2, 3, 4)), "complete 1", "end"]
    assert listener.state() == {}


# -- callbacks that watch a value


def test_early_stopping_waits_for_its_patience_and_counts_from_the_best() -> None:
    assert follow(EarlyStopping("val_loss", 2), [3, 2, 2.5, 1, 1, 1]) == [False] * 5 + [True]


def test_early_stopping_does_not_count_gains_below_min_delta() -> None:
    assert follow(EarlyStopping("val_loss", 2, 0.5), [3, 2.8, 2.6]) == [False, False, True]


def test_nan_is_never_better() -> None:
    callback = EarlyStopping("val_loss", 2)
    assert follow(callback, [NAN, 2, NAN, 1, NAN, NAN]) == [False] * 5 + [True]
    assert callback.best == 1


@pytest.mark.parametrize(
    ("monitor", "mode", "expected"),
    [("val_accuracy", None, 0.7), ("accuracy", "min", 0.2), ("loss", None, 0.2), ("loss", "max", 0.7)],
)
def test_which_way_is_better_follows_from_the_metric_unless_told(
    monitor: str, mode: str | None, expected: float
) -> None:
    callback = EarlyStopping(monitor, 9, mode=mode)
    follow(callback, [0.5, 0.7, 0.2], monitor)
    assert callback.best == expected


def test_stop_at_metric_stops_where_the_value_is_as_good_as_wanted() -> None:
    values = [0.5, NAN, 0.9, 0.3]
    assert follow(StopAtMetric("accuracy", 0.9), values, "accuracy") == [False, False, True, True]
    assert follow(StopAtMetric("loss", 0.1), [0.2, 0.1], "loss") == [False, True]


def test_stop_at_metric_ends_training_on_all_that_is_left() -> None:
    trainer = small_trainer(None, StopAtMetric("loss", 100))
    assert len(small_fit(trainer, epochs=3)) == 1


@pytest.mark.parametrize(
    "callback", [EarlyStopping("val_loss", 1), StopAtMetric("val_loss", 1.0)], ids=["early", "at"]
)
def test_a_run_that_had_come_to_its_end_makes_no_step_when_resumed(callback: Any) -> None:
    follow(callback, [1.0, 2.0])
    resumed = type(callback)("val_loss", 1)
    resumed.load(callback.state())
    assert small_fit(small_trainer(None, resumed)) == []


def factors(callback: ReduceOnPlateau, values: list[float]) -> list[float]:
    trainer = small_trainer(None, callback)
    callback.on_fit_start(trainer, len(values), STEPS)
    result = []
    for value in values:
        trainer.logs = {"val_loss": value}
        callback.on_epoch_end(trainer)
        result.append(trainer.optimizer.lr_factor)
    return result


def test_reduce_on_plateau_multiplies_once_per_patience() -> None:
    callback = ReduceOnPlateau("val_loss", 0.5, 2)
    assert factors(callback, [1, 1, 1, 1, 1, 0, 0, 0]) == [1, 1, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125]


def test_reduce_on_plateau_does_not_count_epochs_that_cool_down() -> None:
    callback = ReduceOnPlateau("val_loss", 0.5, 1, cooldown=2)
    assert factors(callback, [1, 1, 1, 1, 1]) == [1, 0.5, 0.5, 0.5, 0.25]


def test_reduce_on_plateau_goes_no_lower_than_its_limit() -> None:
    callback = ReduceOnPlateau("val_loss", 0.1, 1, min_factor=0.05)
    assert factors(callback, [1, 1, 1, 1]) == [1, 0.1, 0.05, 0.05]


def test_reduce_on_plateau_continues_from_its_state() -> None:
    callback = ReduceOnPlateau("val_loss", 0.5, 2, cooldown=1)
    factors(callback, [1, 1, 1])
    other = ReduceOnPlateau("val_loss", 0.5, 2, cooldown=1)
    other.load(json.loads(json.dumps(callback.state())))
    assert other.state() == callback.state() == {"best": 1, "waited": 0, "cooling": 1}


def test_reduce_on_plateau_lowers_the_learning_rate_that_is_used() -> None:
    plateau = ReduceOnPlateau("val_loss", 0.5, 1, min_delta=100)
    trainer = small_trainer(None, plateau)
    plain = small_trainer()
    small_fit(trainer, 3), small_fit(plain, 3)
    ratios = [a["lr"] / b["lr"] for a, b in zip(trainer.history, plain.history, strict=True)]
    np.testing.assert_allclose(ratios, [1, 1, 0.5], rtol=1e-15)  # halving is exact, dividing not


def test_an_unknown_value_to_monitor_is_refused_before_any_work() -> None:
    trainer = small_trainer(None, EarlyStopping("val_acuracy"))
    expected = (
        "EarlyStopping: there is no value 'val_acuracy' to monitor; "
        "choose one of loss, accuracy, val_loss, val_accuracy"
    )
    with pytest.raises(AgreedError) as caught:
        small_fit(trainer)
    assert str(caught.value) == expected
    assert trainer.step == trainer.epoch == 0


def test_a_validations_value_without_validation_is_refused_after_the_first_epoch() -> None:
    trainer = small_trainer(None, BestWeights("unused", "val_accuracy"))
    with pytest.raises(AgreedError, match=r"'val_accuracy' to monitor; choose one of loss, accuracy$"):
        trainer.fit(small_data()[0], epochs=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EarlyStopping("loss", 0), "EarlyStopping: patience must be at least 1, not 0"),
        (lambda: EarlyStopping("loss", 1, -1), "EarlyStopping: min_delta must be at least 0, not -1"),
        (lambda: EarlyStopping("loss", mode="up"), "EarlyStopping: mode must be 'min' or 'max'"),
        (lambda: StopAtMetric("loss", NAN), "StopAtMetric: value must be a finite number, not nan"),
        (lambda: ReduceOnPlateau(factor=1), "ReduceOnPlateau: factor must be above 0 and below 1"),
        (lambda: ReduceOnPlateau(cooldown=-1), "ReduceOnPlateau: cooldown must be at least 0, not"),
        (lambda: ProgressBar(interval=-1), "ProgressBar: interval must be at least 0, not -1"),
        (lambda: Checkpointer("x", every_epochs=0), "Checkpointer: every_epochs must be at least 1"),
        (lambda: Checkpointer("x", every_epochs=None), "Checkpointer: neither every_epochs nor every"),
        (lambda: Checkpointer("x", keep=0), "Checkpointer: keep must be at least 1, not 0"),
    ],
)
def test_mistakes_are_refused_when_a_callback_is_made(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        make()


def test_a_callback_of_ones_own_says_only_what_follows_from_the_value() -> None:
    class Count(Monitor):
        improvements = 0

        def judge(self, trainer: Any, value: float, improved: bool) -> None:
            self.improvements += improved

    callback = Count("val_loss")
    follow(callback, [3, 2, 4, 1])
    assert callback.improvements == 3


# -- best weights


def test_best_weights_are_those_of_the_best_epoch(tmp_path: Path) -> None:
    path = tmp_path / "best.safetensors"
    weights: list[dict[str, np.ndarray]] = []
    copy = Recorder(
        on_epoch=lambda t: weights.append({n: a.copy() for n, a in t.model.state().items()})
    )
    trainer = small_trainer(None, BestWeights(path, "val_loss"), copy)
    history = small_fit(trainer, epochs=4)
    best = int(np.argmin([logs["val_loss"] for logs in history]))
    model = small_model(seed=5)
    load_weights(model, path)
    for name, value in model.state().items():
        np.testing.assert_array_equal(value, weights[best][name])


@pytest.mark.threads(2)
def test_a_file_that_cannot_be_written_stops_all_ranks(comm: Communicator, tmp_path: Path) -> None:
    if comm.rank == 0:
        (tmp_path / "file").write_text("")
    trainer = small_trainer(comm, BestWeights(tmp_path / "file" / "best.safetensors"))
    with pytest.raises(AgreedError, match=r"save_weights: cannot write .*best\.safetensors"):
        small_fit(trainer)


# -- history


def test_history_is_written_after_every_epoch_as_table_and_as_json(tmp_path: Path) -> None:
    lengths = []
    look = Recorder(on_epoch=lambda t: lengths.append(len(read_csv(tmp_path))))
    trainer = small_trainer(None, HistoryWriter(tmp_path / "run"), look)
    tmp_path = tmp_path / "run"
    history = small_fit(trainer, epochs=2)
    assert lengths == [1, 2]
    expected = [{"epoch": i, **logs} for i, logs in enumerate(history, 1)]
    assert json.loads((tmp_path / "history.json").read_text()) == expected
    table = [{k: float(v) for k, v in row.items()} for row in read_csv(tmp_path)]
    assert table == expected
    assert list(table[0]) == ["epoch", "loss", "accuracy", "lr", "val_loss", "val_accuracy"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["history.csv", "history.json"]


def read_csv(directory: Path) -> list[dict[str, str]]:
    with open(directory / "history.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_history_in_json_has_null_for_what_json_does_not_know(tmp_path: Path) -> None:
    trainer = small_trainer()
    trainer.history = [{"loss": NAN, "val_loss": math.inf}]
    HistoryWriter(tmp_path).on_epoch_end(trainer)
    expected = [{"epoch": 1, "loss": None, "val_loss": None}]
    assert json.loads((tmp_path / "history.json").read_text()) == expected


@pytest.mark.threads(2)
def test_a_history_that_cannot_be_written_stops_all_ranks_before_any_work(
    comm: Communicator, tmp_path: Path
) -> None:
    if comm.rank == 0:
        (tmp_path / "file").write_text("")
    trainer = small_trainer(comm, HistoryWriter(tmp_path / "file"))
    with pytest.raises(AgreedError, match=r"HistoryWriter: cannot write .*history\.csv"):
        small_fit(trainer)
    assert trainer.step == 0


# -- checkpointer


def steps_saved(directory: Path) -> list[int]:
    return [int(path.name.rpartition("-")[2]) for path in find_checkpoints(directory)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"every_epochs": 1, "keep": 9}, [4, 8, 12]),
        ({"every_epochs": 2, "keep": 9}, [8, 12]),
        ({"every_epochs": None, "every_steps": 5, "keep": 9}, [5, 10, 12]),
        ({"every_steps": 3, "keep": 9}, [3, 4, 6, 8, 9, 12]),
        ({"every_epochs": None, "every_steps": 1, "keep": 2}, [11, 12]),
    ],
)
def test_checkpoints_are_saved_at_the_intervals_and_at_the_end(
    options: dict[str, Any], expected: list[int], tmp_path: Path
) -> None:
    small_fit(small_trainer(None, Checkpointer(tmp_path, **options)), epochs=3)
    assert steps_saved(tmp_path) == expected


def test_a_new_run_does_not_mix_its_checkpoints_with_those_of_another(tmp_path: Path) -> None:
    small_fit(small_trainer(None, Checkpointer(tmp_path)), epochs=1)
    with pytest.raises(AgreedError, match=r"holds checkpoint-00000004 of another run; resume from"):
        small_fit(small_trainer(None, Checkpointer(tmp_path)))


def test_a_checkpointer_wants_to_come_after_callbacks_with_state(tmp_path: Path) -> None:
    trainer = small_trainer(None, Checkpointer(tmp_path), EarlyStopping())
    with pytest.raises(AgreedError, match=r"EarlyStopping comes after it .* put the Checkpointer last"):
        small_fit(trainer)
    small_fit(small_trainer(None, Checkpointer(tmp_path), HistoryWriter(tmp_path)), epochs=1)


# -- progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_without_a_terminal_is_a_line_per_epoch() -> None:
    file = io.StringIO()
    history = small_fit(small_trainer(None, ProgressBar(file)), epochs=2)
    first, second = file.getvalue().splitlines()
    for number, (line, logs) in enumerate(zip((first, second), history, strict=True), 1):
        assert line.startswith(f"epoch {number}/2  loss {logs['loss']:.4f}  accuracy ")
        assert f"  lr {logs['lr']:.3g}  val_loss {logs['val_loss']:.4f}  val_accuracy " in line
        assert line.endswith(" s")
        assert " images/s  " in line


def test_progress_without_a_terminal_tells_steps_when_it_is_time() -> None:
    file = io.StringIO()
    small_fit(small_trainer(None, ProgressBar(file, interval=0)), epochs=1)
    lines = file.getvalue().splitlines()
    assert [line.split("  ")[1] for line in lines[:-1]] == [f"step {i}/4" for i in (1, 2, 3, 4)]
    assert all(line.startswith("epoch 1/1  ") and " images/s" in line for line in lines)


def test_progress_on_a_terminal_is_a_bar_and_a_line_per_epoch() -> None:
    file = Terminal()
    small_fit(small_trainer(None, ProgressBar(file)), epochs=2)
    text = file.getvalue()
    assert "epoch 1/2  loss " in text
    assert "epoch 2/2  loss " in text
    assert text.rstrip().rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0  # the cursor is back


def test_progress_goes_to_standard_output_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    small_fit(small_trainer(None, ProgressBar()), epochs=1)
    assert capsys.readouterr().out.startswith("epoch 1/1  loss ")


@pytest.mark.threads(3)
def test_only_rank_0_shows_progress(comm: Communicator) -> None:
    file = io.StringIO()
    small_fit(small_trainer(comm, ProgressBar(file)), epochs=1)
    assert len(file.getvalue().splitlines()) == (comm.rank == 0)


def test_a_resumed_bar_starts_where_the_run_stands() -> None:
    file = io.StringIO()
    trainer = small_trainer(None, ProgressBar(file, interval=0))
    trainer.epoch, trainer.step = 1, 3
    small_fit(trainer, epochs=2)
    assert file.getvalue().startswith("epoch 2/2  step 4/4  ")


def test_a_closed_bar_can_be_closed_again() -> None:
    file = Terminal()
    bar = ProgressBar(file)
    bar.on_fit_start(small_trainer(), 1, STEPS)
    bar.close()
    bar.close()
    assert file.getvalue().count("\x1b[?25h") == 1


def test_training_without_callbacks_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    small_fit(small_trainer(), epochs=1)
    assert capsys.readouterr() == ("", "")
