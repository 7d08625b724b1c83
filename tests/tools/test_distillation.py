"""Distillation: the outputs of a trained model as targets beside the labels."""

import numpy as np
import pytest

from pydtnn import ArrayDataset, Model, Trainer
from pydtnn.comm import Serial, run_threads
from pydtnn.layers import BatchNorm, Dropout, Linear, ReLU, Sequential
from pydtnn.losses import CategoricalCrossEntropy, KLDivergence
from pydtnn.optimizers import SGD
from pydtnn.parallel.exchange import AllReduce
from pydtnn.saving import save_model
from pydtnn.tools.distillation import Teacher
from pydtnn.train import main
from pydtnn.utils.errors import AgreedError
from tests.each import each
from tests.small_run import TINY
from tests.small_training import assert_same_training

T, WEIGHT = 3.0, 0.7
LABELS = CategoricalCrossEntropy(ignore_index=-1)


def data():
    rng = np.random.default_rng(0)
    y = rng.integers(-1, 4, size=(22, 3))  # ranks have other numbers of labels
    return ArrayDataset(rng.normal(size=(22, 3, 5)), y, ignore_index=-1)


def model(*layers, inputs=5):
    return Model(Sequential(*layers), (3, inputs), dtype="float64", seed=len(layers))


def train(student, teacher, comm, batch=11, loss=LABELS, **options):
    options |= {"loss": loss, "exchange": AllReduce(comm), "progress": False}
    trainer = Trainer(student, SGD(lr=0.5), callbacks=[Teacher(teacher, T, WEIGHT)], **options)
    trainer.fit(data(), data(), global_batch_size=batch)
    return trainer


def teacher():
    return model(Linear(16), BatchNorm(), ReLU(), Dropout(0.5), Linear(4))


def test_a_step_has_the_gradient_of_the_weighted_losses_and_an_evaluation_that_of_labels():
    student = model(Linear(4, name="one"))
    (x, labels), w = data().read(np.arange(22)), student.state()["one.w"].copy()
    y, z, backend = student.predict(x), teacher().predict(x), student.backend
    z[labels == -1], count = np.nan, (labels >= 0).sum()
    hard, dy = LABELS(backend, y, labels, (1 - WEIGHT) / count)
    divergence = KLDivergence(T, from_logits=True, ignore_nan=True)
    soft, slope = divergence(backend, y, z, WEIGHT / count)
    trainer = train(student, teacher(), Serial(), batch=22)
    expected = ((1 - WEIGHT) * hard + WEIGHT * soft) / count
    assert trainer.losses == [pytest.approx(expected, rel=1e-12)]
    w -= 0.5 * np.einsum("ntk,ntd->kd", dy + slope, x)
    np.testing.assert_allclose(student.state()["one.w"], w, rtol=1e-11, atol=1e-14)
    hard, _ = LABELS(backend, student.predict(x), labels, 1.0)
    assert trainer.history[0]["val_loss"] == pytest.approx(hard / count, rel=1e-12)
    assert (student.graph.hooks, trainer.objective.losses) == ([], (LABELS,))


def test_two_ranks_learn_from_a_teacher_what_one_learns():
    def rank(comm, **options):
        student = model(Linear(8), ReLU(), Dropout(0.2), Linear(4))
        history = train(student, teacher(), comm, **options).history
        return student.state(), history

    alone = rank(Serial())
    for result in run_threads(2, lambda comm: rank(comm, accumulation=2)):
        assert_same_training(result, alone)


@each(
    ("outputs", "inputs", "loss", "words"),
    [
        (5, 5, LABELS, r"shape of outputs .* must be \(3, 4\), got \(3, 5\)"),
        (4, 6, LABELS, r"shape of inputs .* must be \(\(3, 5\),\), got \(\(3, 6\),\)"),
        (4, 5, "mse", "what the loss compares must be classes, got numbers"),
        (0, 5, LABELS, "no such|does not exist|expected"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused_on_all_ranks(
    tmp_path, outputs, inputs, loss, words
):
    if outputs:
        save_model(model(Linear(outputs), inputs=inputs), tmp_path / "teacher")
    with pytest.raises(AgreedError, match=words) as error:
        run_threads(2, lambda c: train(model(Linear(4)), tmp_path / "teacher", c, loss=loss))
    assert "\n" not in str(error.value)


def test_a_run_of_the_command_line_learns_from_a_saved_model(tmp_path, capsys):
    line, saved = [*TINY, "--epochs=1", f"--output-dir={tmp_path / 'run'}"], tmp_path / "t.pydtnn"
    assert main([*TINY, "--epochs=1", f"--output-dir={tmp_path}", f"--save={saved}"]) == 0
    assert main([*line, f"--teacher={saved}:temperature=4,weight=1"]) == 0
    capsys.readouterr()
    assert main([*line, "--temperature=3"]) == 1
    assert "--teacher temperature requires --teacher" in capsys.readouterr().err
