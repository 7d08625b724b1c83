"""The exponential moving average of the parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn import ArrayDataset, Model, Trainer
from pydtnn.callbacks import EMA, BestWeights, Checkpointer, ExponentialMovingAverage
from pydtnn.comm import Communicator, Serial, run_threads
from pydtnn.layers import BatchNorm, Linear, ReLU, Sequential
from pydtnn.optimizers import SGD
from pydtnn.parallel.reproducible import ExactSums
from pydtnn.parallel.schemes import AllReduce, LocalSGD
from pydtnn.saving.weights import load_weights
from pydtnn.training.callback import evaluated
from pydtnn.training.checkpoint import load_checkpoint, save_checkpoint
from pydtnn.utils.errors import AgreedError
from tests.each import each
from tests.small_training import (
    Interrupt,
    Interrupted,
    Recorder,
    checksums,
    small_data,
    small_fit,
    small_model,
    small_trainer,
)

State = dict[str, np.ndarray]


def copy_of(trainer: Trainer) -> State:
    return {name: array.copy() for name, array in trainer.model.state().items()}


def everything(trainer: Trainer) -> list[Any]:
    """All that two equal runs have in common, to the last bit; the first callback averages."""
    parts = trainer.model, trainer.optimizer, trainer.callbacks[0]
    return [trainer.history, *(checksums(part.state()) for part in parts)]


def averages(initial: State, steps: list[State], decay: float) -> State:
    """The average by its definition."""
    mean = {name: array.copy() for name, array in initial.items()}
    for t, step in enumerate(steps):
        d = min(decay, (1 + t) / (10 + t))
        mean = {name: d * mean[name] + (1 - d) * array for name, array in step.items()}
    return mean


@each("decay", [0.0, 0.3, 0.99])
def test_the_average_is_that_of_the_definition_and_training_is_not_affected(decay):
    steps: list[State] = []
    record = Recorder(on_step=lambda trainer: steps.append(copy_of(trainer)))
    trainer = small_trainer(None, ExponentialMovingAverage(decay), record)
    initial = copy_of(trainer)
    small_fit(trainer)
    for name, mean in averages(initial, steps, decay).items():
        # one rounding of a difference and one of a sum for each of 8 updates
        np.testing.assert_allclose(trainer.model.state()[name], mean, rtol=1e-13, atol=1e-15)
    plain = small_trainer()
    small_fit(plain)
    assert checksums(plain.model.state()) == checksums(steps[-1])


def test_validation_and_best_weights_are_those_of_the_average(tmp_path):
    after_epochs: list[State] = []

    def look(trainer: Any) -> None:
        with evaluated(trainer):
            after_epochs.append(copy_of(trainer))

    path = tmp_path / "best.safetensors"
    # best weights first: their order does not matter
    callbacks = BestWeights(path, "val_loss"), EMA(0.9), Recorder(on_epoch=look)
    history = small_fit(small_trainer(None, *callbacks), epochs=3)
    for state, logs in zip(after_epochs, history, strict=True):
        other = small_trainer(model=small_model(seed=3))
        other.model.load(state)
        assert other.evaluate(small_data()[1])["loss"] == pytest.approx(logs["val_loss"], rel=1e-12)
    best = small_model(seed=5)
    load_weights(best, path)
    index = int(np.argmin([logs["val_loss"] for logs in history]))
    assert checksums(best.state()) == checksums(after_epochs[index])


def test_weights_that_are_loaded_after_an_evaluation_are_those_that_are_averaged():
    first, second = (small_trainer(None, EMA(0.9)) for _ in range(2))
    first.evaluate(small_data()[1])
    for seed in (7, 8):  # also between two calls of fit
        for trainer in (first, second):
            trainer.model.load(small_model(seed=seed).state())
            small_fit(trainer, epochs=seed - 6)
            assert trainer.callbacks[0].updates == 4
    assert everything(first) == everything(second)


@pytest.mark.threads(2)
def test_frozen_parameters_stay_and_thawed_ones_start_a_new_average(comm):
    trainer = small_trainer(comm, average := EMA(0.9))
    small_fit(trainer, epochs=1)
    trainer.model.freeze("conv2d0", "batchnorm1")
    before = copy_of(trainer)
    small_fit(trainer, epochs=2)
    assert average.updates == 4
    after = copy_of(trainer)
    changed = {name for name in after if (after[name] != before[name]).any()}
    assert changed == {"head.w", "head.b"}
    trainer.model.thaw("*")
    small_fit(trainer, epochs=3)
    assert average.updates == 4
    for name in ("conv2d0.w", "batchnorm1.gamma", "batchnorm1.running_mean"):
        assert (trainer.model.state()[name] != before[name]).any(), name


@pytest.mark.threads(2)
@pytest.mark.parametrize(("at", "frozen"), [(3, []), (4, []), (6, ["conv2d0.w", "conv2d0.b"])])
def test_an_interrupted_run_is_resumed_to_the_same_bytes(comm, shared_path, at, frozen):
    """What was frozen then replaces what is now."""
    whole = small_trainer(comm, EMA(0.9), Interrupt(99), Checkpointer(shared_path / "w"))
    if at % 4:  # running statistics are made equal where a checkpoint is saved
        whole.callbacks[1] = Recorder(
            on_step=lambda t: (
                t.optimizer.iterations == at and save_checkpoint(shared_path / "other", t)
            )
        )
    whole.model.set_frozen(frozen)
    small_fit(whole)
    part = small_trainer(comm, EMA(0.9), Interrupt(at, shared_path / "p"))
    part.model.set_frozen(frozen)
    with pytest.raises(Interrupted):
        small_fit(part)
    again = small_trainer(comm, EMA(0.9))
    small_fit(again, epochs=1)
    assert load_checkpoint(shared_path / "p", again)
    if at % 4 == 0:  # the end of an epoch
        value = again.evaluate(small_data()[1])["loss"]
        assert value == pytest.approx(whole.history[0]["val_loss"], rel=1e-12)
    small_fit(again)
    assert everything(again) == everything(whole)
    comm.barrier()


def test_a_checkpoint_of_the_end_contains_the_parameters_to_continue_from(tmp_path):
    """The last one may be saved when the model already has the average."""
    whole = small_trainer(None, EMA(0.9))
    small_fit(whole, epochs=3)
    first = small_trainer(None, EMA(0.9), Checkpointer(tmp_path, every_epochs=9))
    small_fit(first, epochs=1)
    again = small_trainer(None, EMA(0.9))
    load_checkpoint(tmp_path, again)
    assert checksums(again.model.state()) == checksums(first.model.state())
    small_fit(again, epochs=3)
    assert everything(again) == everything(whole)


def test_all_ranks_have_the_same_average_which_their_number_does_not_change():
    def rank(comm: Communicator) -> dict[str, str]:
        exchange = AllReduce(comm, sums=lambda c: ExactSums(c, shards=4))
        trainer = small_trainer(comm, EMA(0.9), exchange=exchange)
        small_fit(trainer)
        return checksums(trainer.model.state())

    results = [result for size in (1, 3) for result in run_threads(size, rank)]
    assert all(result == results[0] for result in results)


@pytest.mark.threads(2)
def test_schemes_with_other_parameters_on_each_rank_are_refused(comm):
    trainer = small_trainer(exchange=LocalSGD(comm), model=small_model())
    trainer.callbacks.append(EMA())
    with pytest.raises(
        AgreedError, match="requires the same parameters on all ranks, got LocalSGD, with"
    ):
        small_fit(trainer)


@each("dtype", ["bfloat16", "float32"])
def test_master_weights_of_16_bit_models_are_averaged_in_float32(dtype):
    net = Sequential(Linear(4), BatchNorm(), ReLU(), Linear(3))
    model = Model(net, (6,), backend="numpy", dtype=dtype)
    rng = np.random.default_rng(0)
    data = ArrayDataset(rng.normal(size=(32, 6)).astype("float32"), rng.integers(0, 3, 32))
    steps: list[State] = []
    record = Recorder(on_step=lambda trainer: steps.append(copy_of(trainer)))
    trainer = Trainer(model, SGD(0.1), exchange=AllReduce(Serial()), callbacks=[EMA(0.9), record])
    initial = copy_of(trainer)
    trainer.fit(data, batch_size=8)
    for name, mean in averages(initial, steps, 0.9).items():
        assert model.state()[name].dtype != "bfloat16"
        np.testing.assert_allclose(model.state()[name], mean, rtol=1e-5, atol=1e-6)  # float32


def test_a_saved_average_of_another_model_is_refused():
    trainer = small_trainer(None, average := EMA())
    small_fit(trainer, epochs=1)
    other = small_trainer(None, loaded := EMA(), model=small_model(filters=5))
    loaded.load(average.state())
    with pytest.raises(AgreedError, match="the saved average must be that of the same model"):
        small_fit(other)
