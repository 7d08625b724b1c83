"""Evaluation of images together with their mirror images."""

import numpy as np
import pytest

from pydtnn import ArrayDataset, Model, Trainer
from pydtnn.callbacks import ExponentialMovingAverage, MirroredEvaluation
from pydtnn.layers import Conv2d, Flatten, Linear, ReLU, Sequential
from pydtnn.optimizers import SGD
from pydtnn.training.callback import evaluated
from pydtnn.utils.errors import AgreedError


def images(n=21, shape=(5, 6, 2)):
    rng = np.random.default_rng(0)
    return ArrayDataset(rng.normal(size=(n, *shape)).astype("float32"), rng.integers(3, size=n))


def trainer_with(*callbacks):
    net = Sequential(Conv2d(4, 3), ReLU(), Flatten(), Linear(3))
    model = Model(net, (5, 6, 2), dtype="float64")
    return Trainer(model, SGD(lr=0.1), callbacks=callbacks, progress=False)


def test_the_loss_is_that_of_the_mean_of_both_outputs_and_training_is_not_changed():
    data = images()
    mirrored, plain = trainer_with(MirroredEvaluation()), trainer_with()
    for trainer in (mirrored, plain):
        trainer.fit(data, data, epochs=2, batch_size=8)
    for name, array in plain.model.state().items():
        np.testing.assert_array_equal(mirrored.model.state()[name], array)
    x, y = data.read(np.arange(len(data)))
    both = x, np.ascontiguousarray(x[:, :, ::-1])
    scores = sum(plain.model.predict(one) for one in both) / 2
    chosen = scores[np.arange(len(y)), y]
    expected = (np.log(np.exp(scores).sum(1)) - chosen).mean()
    for found in (mirrored.logs["val_loss"], mirrored.evaluate(data, batch_size=5)["loss"]):
        assert found == pytest.approx(expected, rel=1e-6)
    assert plain.logs["val_loss"] != pytest.approx(expected, rel=1e-3)
    assert mirrored.logs["loss"] == plain.logs["loss"]


def test_contexts_may_be_nested_and_leave_the_model_as_it_was():
    trainer = trainer_with(MirroredEvaluation(), ExponentialMovingAverage(0.5))
    trainer.fit(images(), images(), epochs=1, batch_size=8)
    x = images().read(np.arange(4))[0].astype("float64")
    own = trainer.model.predict(x)
    with evaluated(trainer):
        once = trainer.model.predict(x)
        with evaluated(trainer):
            np.testing.assert_array_equal(trainer.model.predict(x), once)
        np.testing.assert_array_equal(trainer.model.predict(x), once)
    np.testing.assert_array_equal(trainer.model.predict(x), own)
    assert not np.array_equal(once, own)


def test_samples_that_are_no_images_are_refused_before_training():
    model = Model(Linear(3), (4,))
    trainer = Trainer(model, SGD(lr=0.1), callbacks=[MirroredEvaluation()], progress=False)
    with pytest.raises(AgreedError, match=r"MirroredEvaluation requires images \(H, W, C\), got"):
        trainer.fit(images(shape=(4,)), epochs=1)
