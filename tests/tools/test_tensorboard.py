"""Event files are read back, record by record, with tensorboardX's protocol buffers."""

from __future__ import annotations

import struct
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.callbacks import Callback
from pydtnn.cli.build import create_job
from pydtnn.cli.parser import parse
from pydtnn.comm import Serial
from pydtnn.parallel.schemes import AllReduce, Gossip, LocalSGD
from pydtnn.tools.trackers import TensorBoard
from pydtnn.training.checkpoint import load_checkpoint, save_checkpoint
from pydtnn.utils import clock
from pydtnn.utils.errors import AgreedError
from tests.each import each
from tests.small_run import TINY
from tests.small_training import STEPS, Ticks, small_fit, small_trainer, spend

pytestmark = pytest.mark.skipif(  # its import imports PyTorch
    find_spec("tensorboardX") is None, reason="the extra tensorboard is not installed"
)


def records(path: Path) -> Iterator[bytes]:
    """Read TFRecords: length, its checksum, content, its checksum."""
    from tensorboardX.record_writer import masked_crc32c

    with path.open("rb") as file:
        while header := file.read(8):
            assert struct.unpack("<I", file.read(4))[0] == masked_crc32c(header)
            content = file.read(struct.unpack("<Q", header)[0])
            assert struct.unpack("<I", file.read(4))[0] == masked_crc32c(content)
            yield content


def events(folder: Path) -> list[Any]:
    from tensorboardX.proto.event_pb2 import Event

    files = sorted(folder.iterdir(), key=lambda path: int(path.suffix[1:]))
    return [Event.FromString(content) for path in files for content in records(path)]


def values(folder: Path) -> Iterator[tuple[int, Any]]:
    return ((event.step, value) for event in events(folder) for value in event.summary.value)


def curves(folder: Path) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for step, value in values(folder):
        if value.WhichOneof("value") == "simple_value":
            found[value.tag][step] = value.simple_value
    return found


class Second(Callback):
    """Every step takes a second, and every evaluation ten."""

    def on_step_end(self, trainer: Any) -> None:
        spend(1)

    @contextmanager
    def evaluated(self, trainer: Any) -> Iterator[None]:
        spend(10)
        yield


@pytest.mark.threads(2)
@each("scheme", [AllReduce, Gossip, lambda comm: LocalSGD(comm, period=3)])
def test_curves_have_the_history_and_the_losses_of_steps(comm, tmp_path, scheme):
    """Those over the samples of all ranks, also where these train independently."""
    board = TensorBoard(tmp_path, every_steps=2)
    trainer = small_trainer(comm, Second(), board, exchange=scheme(comm))
    with clock.used(Ticks()):
        history = small_fit(trainer, epochs=2)
    trainer.comm.barrier()
    found = curves(tmp_path)
    steps = [STEPS, 2 * STEPS]
    for name in history[0]:
        points = {step: logs[name] for step, logs in zip(steps, history, strict=True)}
        assert found.pop(name) == pytest.approx(points)
    shown = range(2, 2 * STEPS + 1, 2)
    assert found.pop("step/loss") == pytest.approx({s: trainer.losses[s - 1] for s in shown})
    assert [*found["step/lr"]] == [*shown]
    assert found.pop("step/lr")[2 * STEPS] == pytest.approx(trainer.optimizer.lr_now)
    found.pop("samples_per_second", None)  # on this clock, only callbacks take time
    speeds = {2: 16 / 2, 4: 13 / 2, 6: 16 / 2, 8: 13 / 2}  # the last step of an epoch has 5 samples
    assert found.pop("step/samples_per_second") == pytest.approx(speeds)
    assert not found
    assert len([*tmp_path.iterdir()]) == 1


def test_a_resumed_run_continues_its_curves(tmp_path):
    class Stop(Callback):
        """Save a checkpoint after the first epoch."""

        def on_epoch_end(self, trainer: Any) -> None:
            if trainer.epoch == 1:
                save_checkpoint(tmp_path / "saved", trainer)

    folder = tmp_path / "events"
    first = small_trainer(None, TensorBoard(folder, every_steps=1), Stop())
    small_fit(first, epochs=2)
    second = small_trainer(None, TensorBoard(folder, every_steps=1), Stop())
    load_checkpoint(tmp_path / "saved", second)
    small_fit(second, epochs=3)
    starts = [event.step for event in events(folder) if event.HasField("session_log")]
    assert starts == [1, STEPS + 1]  # what has been written of later steps is not shown
    again = curves(folder)["step/loss"]
    losses = [*first.losses[:STEPS], *second.losses]
    assert again == pytest.approx(dict(enumerate(losses, start=1)))


def test_histograms_are_those_of_parameters_and_gradients(tmp_path):
    trainer = small_trainer(None, TensorBoard(tmp_path, histograms=2))
    small_fit(trainer, epochs=3)
    found = {(step, v.tag): v.histo for step, v in values(tmp_path) if v.HasField("histo")}
    names = [f"{what}/{name}" for name in trainer.model.parameters for what in KINDS]
    assert sorted(found) == sorted((2 * STEPS, name) for name in names)
    p = trainer.model.parameters["head.w"]
    histogram = found[2 * STEPS, "parameters/head.w"]
    assert histogram.num == sum(histogram.bucket) == p.size
    assert histogram.min < histogram.sum / p.size < histogram.max
    assert found[2 * STEPS, "gradients/head.w"].sum_squares > 0


KINDS = ("parameters", "gradients")


def test_values_that_are_not_finite_are_left_out_of_histograms(tmp_path):
    board = TensorBoard(tmp_path)
    board.begin({})
    board.histogram(1, "some", np.array([1.0, np.nan, np.inf, 3.0]))
    board.histogram(1, "none", np.array([np.nan]))
    board.end("failed")
    (found,) = [v for _, v in values(tmp_path) if v.HasField("histo")]
    assert (found.tag, found.histo.num, found.histo.min, found.histo.max) == ("some", 2, 1, 3)


def test_hyper_parameters_are_written_with_the_results(tmp_path):
    from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

    own = {"crop": 4, "widths": [1, 2], "seed": None, "flip": True}
    trainer = small_trainer(None, TensorBoard(tmp_path, hyper_parameters=own))
    small_fit(trainer, epochs=2)
    contents = {
        value.tag: HParamsPluginData.FromString(value.metadata.plugin_data.content)
        for _, value in values(tmp_path)
        if value.metadata.plugin_data.plugin_name == "hparams"
    }
    given = contents["_hparams_/session_start_info"].session_start_info.hparams
    assert given["optimizer"].string_value == "SGD"
    assert given["ranks"].number_value == 1
    assert given["parameters"].number_value == trainer.model.whole.size
    assert (given["crop"].number_value, given["widths"].string_value) == (4, "[1, 2]")
    assert given["flip"].bool_value
    assert "seed" not in given
    metrics = contents["_hparams_/experiment"].experiment.metric_infos
    assert {info.name.tag for info in metrics} == {*trainer.history[-1]} - {"lr"}
    assert "_hparams_/session_end_info" in contents


@pytest.mark.threads(2)
def test_an_error_within_an_epoch_is_one_warning(comm, tmp_path, monkeypatch, caplog):
    def full(self: TensorBoard, step: int, found: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TensorBoard, "_curves", full)
    trainer = small_trainer(comm, TensorBoard(tmp_path, every_steps=1))
    small_fit(trainer)
    assert trainer.epoch > 0
    comm.gather_object(None)
    if comm.rank == 0:
        lost = [text for text in caplog.messages if text.startswith("TensorBoard: cannot report")]
        assert len(lost) == 2 * trainer.epoch  # of its first step, and of its end
        assert "No space left on device" in lost[0]


def test_only_histograms_read_gradients():
    assert not TensorBoard("folder").reads_gradients
    assert TensorBoard("folder", histograms=1).reads_gradients
    with pytest.raises(ValueError, match="TensorBoard: histograms must be at least 1"):
        TensorBoard("folder", histograms=0)


def test_a_folder_that_cannot_be_created_ends_the_run_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AgreedError, match="TensorBoard: cannot start a run: .*Not a directory"):
        small_fit(small_trainer(None, TensorBoard(tmp_path / "file" / "folder")))


@pytest.mark.threads(2)
def test_without_the_package_all_ranks_are_told_how_to_install_it(comm, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    trainer = small_trainer(comm, TensorBoard(tmp_path))
    with pytest.raises(AgreedError, match="TensorBoard requires .*: pip install tensorboardX"):
        small_fit(trainer)


def test_hyper_parameters_are_the_options_that_affect_results(tmp_path):
    config = parse([*TINY, "--tensorboard", "--tensorboard-histograms=2"])
    trainer = create_job(config, Serial(), 1, tmp_path).trainer
    (own,) = [c for c in trainer.callbacks if isinstance(c, TensorBoard)]
    assert own.histograms == 2
    assert own.hyper_parameters["epochs"] == config.epochs
    assert own.hyper_parameters["dataset"] == config.dataset
    assert not {"lr", "threads", "output_dir"} & {*own.hyper_parameters}
