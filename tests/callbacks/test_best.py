"""The best weights of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pydtnn.callbacks import (
    BestWeights,
)
from pydtnn.comm import Communicator
from pydtnn.saving.weights import load_weights
from pydtnn.utils.errors import AgreedError
from tests.small_training import (
    Recorder,
    small_data,
    small_fit,
    small_model,
    small_trainer,
)


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
def test_best_weights_of_a_value_in_training_are_those_of_all_ranks(
    comm: Communicator, shared_path: Path
) -> None:
    path = shared_path / "best.safetensors"
    trainer = small_trainer(comm, BestWeights(path, "loss"))
    trainer.fit(small_data()[0], global_batch_size=8)
    model = small_model(seed=5)
    load_weights(model, path)
    comm.barrier()
    for name, value in trainer.model.state().items():
        np.testing.assert_array_equal(value, model.state()[name])


@pytest.mark.threads(2)
def test_a_file_that_cannot_be_written_stops_all_ranks(comm: Communicator, tmp_path: Path) -> None:
    if comm.rank == 0:
        (tmp_path / "file").write_text("")
    trainer = small_trainer(comm, BestWeights(tmp_path / "file" / "best.safetensors"))
    with pytest.raises(AgreedError, match=r"save_weights: cannot write .*best\.safetensors"):
        small_fit(trainer)
