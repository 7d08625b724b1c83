"""Evaluation of images together with their mirror images."""

import numpy as np
import pytest

from pydtnn import ArrayDataset, Model, Trainer
from pydtnn.callbacks import MirroredEvaluation
from pydtnn.layers import Conv2d, Flatten, Linear, ReLU, Sequential
from pydtnn.losses import CategoricalCrossEntropy
from pydtnn.optimizers import SGD
from pydtnn.training.callback import evaluated
from pydtnn.utils.errors import AgreedError

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(21, 5, 6, 2)).astype("float32"), RNG.integers(3, size=21)


def trainer_with(*callbacks):
    net = Sequential(Conv2d(4, 3), ReLU(), Flatten(), Linear(3))
    model = Model(net, X.shape[1:], dtype="float64")
    trainer = Trainer(model, SGD(lr=0.1), callbacks=callbacks, progress=False)
    trainer.fit(ArrayDataset(X, Y), ArrayDataset(X, Y), epochs=2, batch_size=8)
    return trainer


def test_outputs_are_means_for_an_image_and_its_mirror_image_while_a_model_is_evaluated():
    mirrored, plain = trainer_with(MirroredEvaluation()), trainer_with()
    for name, array in plain.model.state().items():
        np.testing.assert_array_equal(mirrored.model.state()[name], array)
    scores = [plain.model.predict(np.ascontiguousarray(x)) for x in (X, X[:, :, ::-1])]
    np.testing.assert_array_equal(mirrored.model.predict(X), scores[0])
    with evaluated(mirrored), evaluated(mirrored):  # contexts may be nested
        np.testing.assert_allclose(mirrored.model.predict(X), sum(scores) / 2, rtol=1e-12)
    loss = CategoricalCrossEntropy().compute(plain.model.backend, sum(scores) / 2, Y, 1, scores[0])
    assert mirrored.logs["val_loss"] == pytest.approx(float(loss) / len(Y), rel=1e-6)
    assert mirrored.logs["loss"] == plain.logs["loss"]


def test_moved_images_and_their_mirror_images_are_evaluated_in_the_last_epoch():
    trainer, plain = trainer_with(MirroredEvaluation(moved=2)), trainer_with()
    ours, others = ([h["val_loss"] for h in t.history] for t in (trainer, plain))
    assert ours[0] == others[0]
    assert ours[1] != others[1]
    wide = np.pad(X, ((0, 0), (2, 2), (2, 2), (0, 0)))
    images = [wide[:, 2 + by : 7 + by, 2 + by : 8 + by] for by in (-2, 0, 2)]
    images += [x[:, :, ::-1] for x in images]
    scores = [trainer.model.predict(np.ascontiguousarray(x)) for x in images]
    with evaluated(trainer):
        np.testing.assert_allclose(trainer.model.predict(X), sum(scores) / 6, rtol=1e-12)


def test_samples_that_are_no_images_are_refused_before_training():
    trainer = Trainer(Model(Linear(3), (4,)), SGD(lr=0.1), callbacks=[MirroredEvaluation()])
    with pytest.raises(AgreedError, match=r"MirroredEvaluation requires images \(H, W, C\), got"):
        trainer.fit(ArrayDataset(X[:, 0, :2].reshape(21, 4), Y), epochs=1)
    with pytest.raises(AgreedError, match=r"images of more than 5 pixels, got \(5, 6, 2"):
        trainer_with(MirroredEvaluation(moved=5))
