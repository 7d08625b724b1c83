"""What a trainer refuses before it begins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn import Mesh, Model, Trainer, layers
from pydtnn.callbacks import EarlyStopping
from pydtnn.comm import Communicator, run_threads
from pydtnn.data import ArrayDataset, Loader, TokenDataset
from pydtnn.layers import BatchNorm, Flatten, Linear, Sequential
from pydtnn.optimizers import SGD, Adam
from pydtnn.parallel.reproducible import ExactSums
from pydtnn.parallel.schemes import AllReduce, LocalSGD
from pydtnn.utils.errors import AgreedError
from tests.each import each
from tests.small_training import STEPS, small_data, small_model, small_trainer

EMPTY = ArrayDataset(np.zeros((0, 5, 5, 2)), np.zeros(0, int), classes=3, name="val")
OTHER = ArrayDataset(np.zeros((3, 6, 5, 2)), [0] * 3, name="val")
PAIR = np.zeros((4, 5, 5, 2)), [0] * 4


@each(
    ("error", "words", "call"),
    [
        (TypeError, "expected a data set, .*; use Arr", lambda own, train: own.fit(PAIR)),
        (TypeError, "expected a data set, .*; use Arr", lambda own, train: own.fit(train, PAIR)),
        (ValueError, "validation sample, got none", lambda own, train: own.fit(train, EMPTY)),
        (
            ValueError,
            r"got val with samples of shape \(6, 5, 2\) instead of \(5, 5, 2\)",
            lambda own, train: own.fit(train, OTHER),
        ),
        (TypeError, "epochs must be a whole number", lambda own, train: own.fit(train, epochs=1.5)),
        (ValueError, "epochs must be at least 0", lambda own, train: own.fit(train, epochs=-1)),
        (ValueError, "batch_size must be at", lambda own, train: own.evaluate(train, batch_size=0)),
    ],
)
def test_what_cannot_be_trained_with_is_refused_before_the_first_step(error, words, call):
    trainer = small_trainer()
    with pytest.raises(error, match=f"^Trainer: .*{words}"):
        call(trainer, small_data()[0])
    assert trainer.optimizer.iterations == 0


@each(
    ("change", "words"),
    [
        ({"epochs": 3}, "the same epochs, got 2 on rank 0 and 3 on rank 1"),
        ({"global_batch_size": 4}, "global batch size, got 8 on rank 0 and 4 on rank 1"),
        ({"steps_per_epoch": 2}, "the same steps, got 4 on rank 0 and 2 on rank 1"),
        ({"seed": 1}, "the same seed, got 0 on rank 0 and 1 on rank 1"),
        ({"validation": None}, "same validated, got 16 on rank 0 and 0 on rank"),
        ({"samples": 25}, "the same samples, got 29 on rank 0 and 25 on rank 1"),
        ({"model": 5}, "number of parameters, got 195 on rank 0 and 243 on rank 1"),
        ({"optimizer": Adam(0.1)}, "optimizer, got 'SGD' on rank 0 and 'Adam' on r"),
        ({"optimizer": SGD(0.2)}, "learning rate, got 0.1 on rank 0 and 0.2 on rank 1"),
    ],
)
@pytest.mark.threads(2)
def test_ranks_that_would_do_different_work_are_refused_before_any(comm, change, words):
    mine: dict[str, Any] = change if comm.rank == 1 else {}
    train, validation = small_data()
    given = {"validation": validation, "epochs": 2, "global_batch_size": 8, **mine}
    train = train.subset(np.arange(given.pop("samples", len(train))))
    trainer = small_trainer(
        comm,
        model=small_model(filters=given.pop("model", 4)),
        optimizer=given.pop("optimizer", SGD(0.1)),
    )
    with pytest.raises(AgreedError, match=f"^Trainer: all ranks must have .*{words}"):
        trainer.fit(train, **given)
    assert trainer.optimizer.iterations == 0


@pytest.mark.threads(2)
def test_ranks_of_a_scheme_that_lets_them_differ_may_have_their_own_learning_rates(comm):
    train, _ = small_data()
    own = SGD(0.1 * (1 + comm.rank))
    trainer = small_trainer(comm, optimizer=own, exchange=LocalSGD(comm, period=2))
    assert len(trainer.fit(train, epochs=1, global_batch_size=8)) == 1


@each(
    ("change", "words"),
    [
        ({"model": Linear(3)}, r"model must be a Model, got .*; make one: Model\(net, inp"),
        ({"optimizer": 0.1}, "optimizer must be an Optimizer, got 0.1"),
        ({"optimizer": SGD}, r"optimizer must be .*; make one: SGD\(\.\.\.\)"),
        ({"callbacks": EarlyStopping()}, r"callbacks must be a list, such as \[EarlyStopping"),
        ({"callbacks": ["best"]}, "callback must be a Callback, got 'best'"),
        ({"exchange": "allreduce"}, "exchange must be a GradientExchange, got 'al"),
        ({"metrics": "accuracy"}, r"metrics must be a list, such as \['accuracy'\], got"),
        ({"accumulation": 1.5}, "accumulation must be a whole number, got 1.5"),
    ],
)
def test_what_a_trainer_is_not_made_of_is_told(change, words):
    given = {"model": small_model(), "optimizer": SGD(0.1), **change}
    with pytest.raises(TypeError, match=f"^Trainer: {words}"):
        Trainer(given.pop("model"), given.pop("optimizer"), **given)


@each(("ranks", "accumulation", "batch", "most"), [(1, 9, 8, 8), (3, 4, 8, 3)])
def test_more_micro_batches_than_samples_are_refused(ranks, accumulation, batch, most):
    train, _ = small_data()

    def rank(comm: Communicator) -> None:
        trainer = Trainer(
            small_model(), SGD(0.1), exchange=AllReduce(comm), accumulation=accumulation
        )
        words = f"the {most} samples of a rank per step, got {accumulation}; use at most {most}$"
        with pytest.raises(ValueError, match=f"^Trainer: accumulation .*{words}"):
            trainer.fit(train, global_batch_size=batch)
        assert trainer.optimizer.iterations == 0

    run_threads(ranks, rank)


def flat_norm(comm: Communicator, **options: Any) -> Trainer:
    net = Sequential(Flatten(), Linear(4), BatchNorm(name="norm"), Linear(3))
    model = Model(net, (5, 5, 2), backend="numpy", dtype="float64")
    return Trainer(model, SGD(0.1), exchange=options.pop("exchange", AllReduce(comm)), **options)


@pytest.mark.threads(2)
def test_batch_norm_over_a_single_row_is_refused(comm):
    train, _ = small_data()  # 29 samples
    words = "^Trainer: norm normalises over the samples only .* in {}, .* 1, whose variance is 0"
    every, last = words.format("each step"), words.format("the last step .*")
    exact = AllReduce(comm, sums=lambda comm: ExactSums(comm, shards=8))
    for batch, sentence, options in (
        (2, every, {}),
        (8, every, {"accumulation": 3}),  # 8 samples, 2 ranks, 3 micro-batches each
        (8, every, {"exchange": exact}),
        (7, last, {}),  # which leave 1, 2 and 1 samples
        (9, last, {}),
        (7, last, {"sync_batch_norm": True}),
    ):
        with pytest.raises(ValueError, match=sentence):
            flat_norm(comm, **options).fit(train, global_batch_size=batch)


@pytest.mark.threads(2)
def test_batch_norm_over_two_rows_is_not_refused(comm):
    train, _ = small_data()
    flat_norm(comm).fit(train, global_batch_size=4, steps_per_epoch=7)
    flat_norm(comm).fit(train.subset(np.arange(28)), global_batch_size=8)
    flat_norm(comm, sync_batch_norm=True).fit(train, global_batch_size=9)  # the last step: 1 + 1
    one = train.subset(np.arange(5))
    small_trainer(comm).fit(one, global_batch_size=2)  # images: 9 rows in a sample


def with_another_pixel(x: Any, y: Any) -> Any:
    return np.where(np.arange(29).reshape(-1, 1, 1, 1) == 28, 0, x), y


@pytest.mark.threads(2, 3)
@each(
    ("change", "which"),
    [
        (with_another_pixel, "training"),
        (lambda x, y: (x, np.r_[(y[0] + 1) % 3, y[1:]]), "validation"),
        (lambda x, y: (x[::-1], y[::-1]), "validation"),
        (lambda x, y: (x.astype("float32"), y), "training"),
    ],
)
def test_ranks_with_other_data_of_the_same_length_are_refused(comm, change, which):
    train, validation = small_data()
    other = train
    if comm.rank > 0:
        other = ArrayDataset(*change(train.x.copy(), train.y), classes=3)
    given = (other, validation) if which == "training" else (validation, other)
    ranks = "rank 1" if comm.size == 2 else "ranks 1, 2"
    words = f"^Trainer: the samples.* of the {which} set array differ on {ranks} "
    with pytest.raises(AgreedError, match=words):
        small_trainer(comm).fit(*given, global_batch_size=8)


@pytest.mark.threads(2)
def test_data_that_are_augmented_while_they_are_read_are_compared_by_type_alone(comm):
    class Noisy(ArrayDataset):
        def read(self, indices: Any) -> Any:
            x, y = super().read(indices)
            return x + noise.normal(size=x.shape), y

    noise = np.random.default_rng(comm.rank)
    train, _ = small_data()
    assert small_trainer(comm).fit(Noisy(train.x, train.y), global_batch_size=8)


@pytest.mark.threads(2, 3)
def test_evaluations_of_other_data_on_each_rank_are_refused(comm):
    _, data = small_data()
    rows = range(comm.rank, len(data) - len(data) % comm.size, comm.size)
    trainer = small_trainer(comm)
    for own in (rows, range(16 - (comm.rank > 0))):
        with pytest.raises(AgreedError, match=r"^Trainer: the samples of the data set array diffe"):
            trainer.evaluate(data.subset(own))
    with pytest.raises(AgreedError, match="same global batch size, got 8 on rank 0 and 9 on"):
        trainer.evaluate(data, global_batch_size=8 + comm.rank)
    with pytest.raises((ValueError, AgreedError), match="expected at least one .*, got none in"):
        trainer.evaluate(EMPTY)
    assert trainer.evaluate(data)["loss"] > 0


LAYERS: dict[str, Any] = {
    "net.attention": layers.MultiHeadAttention(2, name="net"),
    "layer0_reverse": layers.LSTM(6, bidirectional=True, name=""),
    "conv": layers.Conv1d(6, 3, padding="same", name="conv"),
    "": layers.MultiHeadAttention(2, causal=True),
    None: layers.Conv1d(6, 3, padding=((2, 0),)),
}


@each("name", LAYERS)
def test_networks_that_see_the_next_tokens_are_not_trained_to_predict_them(name):
    net = Sequential(layers.Embedding(5, 6), LAYERS[name], Linear(5))
    model = Model(net, (8,), backend="numpy")
    trainer = Trainer(model, SGD(0.1), progress=False)
    data = TokenDataset(np.arange(100) % 5, 8).subset(range(9))
    if name:
        with pytest.raises(ValueError, match=f"next tokens, which .* sees: {name} looks ahead;"):
            trainer.fit(data)
        data = ArrayDataset(*data.read(np.arange(9)))  # of which nothing is known
    trainer.fit(data, steps_per_epoch=1)


def test_an_evaluation_of_other_classes_than_those_of_training_is_refused():
    train, _ = small_data()
    ours, theirs = (ArrayDataset(train.x, train.y, class_names=[*name]) for name in ("abc", "cba"))
    trainer = small_trainer()
    trainer.fit(ours, global_batch_size=8)
    with pytest.raises(ValueError, match="use the same classes in the same order"):
        trainer.evaluate(theirs)


@pytest.mark.threads(2)
def test_a_loader_of_ranks_refuses_other_data_on_each(comm):
    data, _ = small_data()
    with pytest.raises(AgreedError, match=r"^Loader: the samples of the data set array differ on"):
        Loader(data.subset(range(comm.rank, 28, 2)), global_batch_size=8, comm=comm)
    loader = Loader(data, global_batch_size=8, comm=comm)
    assert (loader.rank, loader.size) == (comm.rank, 2)


@pytest.mark.threads(4)
def test_parts_of_a_network_refuse_to_predict_other_samples(comm):
    mesh = Mesh(comm, data=2, filter=2)
    model = Model(Sequential(Flatten(), Linear(4), Linear(3)), (5,), mesh=mesh, backend="numpy")
    x = np.random.default_rng(mesh.position["data"]).random((6, 5), np.float32)
    assert model.predict(x).shape == (6, 3)  # others along the axis of the data
    for own in (x + mesh.position["filter"], x[: 6 - mesh.position["filter"]]):
        with pytest.raises(AgreedError, match=r"^Model.predict: the samples differ on rank "):
            model.predict(own)


def fit(trainer: Trainer, **options: Any) -> list[dict[str, float]]:
    train, validation = small_data()
    return trainer.fit(train, validation, global_batch_size=8, **options)


def test_more_epochs_continue_from_the_present_state():
    parts, whole = small_trainer(), small_trainer()
    assert len(fit(parts)) == 1  # without a number of epochs
    assert len(fit(parts, more_epochs=2)) == 3
    assert fit(whole, epochs=3) == parts.history
    fit(whole, more_epochs=0)
    assert whole.epoch == 3


@pytest.mark.threads(2)
def test_without_a_batch_size_a_few_samples_are_one_step(comm):
    trainer, (train, validation) = small_trainer(comm), small_data()
    trainer.fit(train, validation)
    assert trainer.global_batch_size == len(train) < 64
    assert len(trainer.losses) == 1
    with pytest.raises(ValueError, match=f"batch must be at most the {len(train)} samples"):
        trainer.fit(train, batch_size=64, more_epochs=1)


def test_the_last_smaller_step_is_omitted_on_request():
    trainer, (train, _) = small_trainer(), small_data()
    trainer.fit(train, epochs=2, global_batch_size=8, drop_last=True)
    assert len(trainer.losses) == 2 * (STEPS - 1)
    assert trainer.samples_seen == 2 * 8 * (STEPS - 1)
    trainer.fit(train.subset(range(24)), more_epochs=1, global_batch_size=8, drop_last=True)
    assert len(trainer.losses) == 2 * (STEPS - 1) + 3  # all of them are whole


def test_both_numbers_of_epochs_are_refused():
    with pytest.raises(TypeError, match="^fit: expected epochs or more_epochs, got both; "):
        fit(small_trainer(), epochs=3, more_epochs=2)
    with pytest.raises(ValueError, match="^Trainer: more_epochs must be at least 0, got -1"):
        fit(small_trainer(), more_epochs=-1)


def test_an_argument_of_another_library_names_ours_and_a_misspelt_one_the_nearest():
    trainer = small_trainer()
    for name in ("validation_data", "verbose", "callbacks", "shuffle", "x", "y"):
        with pytest.raises(TypeError, match=f"^fit: there is no argument `{name}`; "):
            fit(trainer, **{name: 1})
    with pytest.raises(TypeError, match="^fit: unknown argument 'epoch'; did you mean 'epochs'"):
        fit(trainer, epoch=3)
    assert trainer.epoch == 0
