"""The best weights of a run."""

from __future__ import annotations

import re

import numpy as np
import pytest

from pydtnn.callbacks import BestWeights, Callback, Checkpointer, EarlyStopping
from pydtnn.parallel.schemes import AllReduce, ShardedOptimizer
from pydtnn.training.checkpoint import load_checkpoint
from pydtnn.training.trainer import Trainer
from pydtnn.utils.errors import AgreedError
from tests.each import each
from tests.small_training import Recorder, checksums, small_data, small_fit, small_trainer


def best_of(epochs: int) -> dict[str, np.ndarray]:
    """The weights of the epoch with the largest loss in validation: not the last one."""
    weights: list[dict[str, np.ndarray]] = []
    copy = Recorder(
        on_epoch=lambda t: weights.append({n: a.copy() for n, a in t.model.state().items()})
    )
    history = small_fit(small_trainer(None, copy), epochs)
    return weights[int(np.argmax([logs["val_loss"] for logs in history]))]


def restoring(*others: Callback) -> list[Callback]:
    return [EarlyStopping("val_loss", 9, mode="max", restore_best=True), *others]


@pytest.mark.threads(1, 3)
@each("scheme", [AllReduce, ShardedOptimizer])
def test_training_ends_with_the_weights_of_the_best_epoch_on_every_rank(comm, scheme):
    trainer = small_trainer(None, *restoring(), exchange=scheme(comm))
    small_fit(trainer, epochs=4)
    if comm.size == 1:  # otherwise batch norm normalises the samples of each rank
        for name, value in best_of(4).items():
            np.testing.assert_allclose(trainer.model.state()[name], value, rtol=1e-10, atol=1e-12)
    logs = trainer.evaluate(small_data()[1], global_batch_size=8)
    best = max(logs["val_loss"] for logs in trainer.history)
    assert logs["loss"] == pytest.approx(best, rel=1e-12)
    assert len(set(comm.gather_object(str(checksums(trainer.model.state()))))) == 1


def test_a_resumed_run_restores_the_best_epoch_before_it_was_interrupted(tmp_path):
    """And the checkpoint at the end of training contains the last weights, not the restored."""

    def run(epochs: int) -> Trainer:
        trainer = small_trainer(None, *restoring(Checkpointer(tmp_path, every_epochs=3)))
        load_checkpoint(tmp_path, trainer)
        small_fit(trainer, epochs)
        return trainer

    run(1), run(2)
    trainer = run(4)
    for name, value in best_of(4).items():
        np.testing.assert_array_equal(trainer.model.state()[name], value)
    plain = small_trainer()
    history = small_fit(plain, 4)
    assert trainer.history == history


def test_weights_that_were_not_saved_cannot_be_restored(tmp_path):
    small_fit(small_trainer(None, EarlyStopping(), Checkpointer(tmp_path)), 1)
    trainer = small_trainer(None, *restoring(Checkpointer(tmp_path)))
    with pytest.raises(AgreedError, match="restore_best requires the weights of the best epoch"):
        load_checkpoint(tmp_path, trainer)


@pytest.mark.threads(2)
def test_training_continues_if_the_file_cannot_be_written(comm, tmp_path, caplog):
    if comm.rank == 0:
        (tmp_path / "file").write_text("")
    trainer = small_trainer(comm, BestWeights(tmp_path / "file" / "best.safetensors"))
    assert len(small_fit(trainer)) == 2
    words = r"save_weights: cannot write .*best\.safetensors: .*; training continues without it"
    assert re.search(words, caplog.text)
