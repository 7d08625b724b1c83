"""BERT, T5 and the encoder-decoder transformer: what outputs depend on, and ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator, run_threads
from pydtnn.comm.serial import Serial
from pydtnn.data import ArrayDataset
from pydtnn.losses import CategoricalCrossEntropy
from pydtnn.model import Model
from pydtnn.models import create_net
from pydtnn.optimizers import SGD, Adam, Optimizer
from pydtnn.parallel.mesh import Mesh
from pydtnn.parallel.schemes import create_scheme
from pydtnn.tools.testing import check_plan
from pydtnn.training.trainer import Trainer
from tests.each import each

TOKENS, LENGTH = 9, 6
MOMENTUM, ADAM = partial(SGD, 0.1, momentum=0.9), partial(Adam, 0.01)
PAIRS = ((LENGTH,), (LENGTH,), (1,))
NETS: dict[str, Any] = {
    "bert_nano": ((LENGTH,), (1,), (LENGTH,)),
    "transformer_nano": PAIRS,
    "t5_nano": PAIRS,
}


def made(
    name: str, shape: Any, mesh: Mesh | None = None, schedule: str | None = None, **options: Any
) -> Model:
    """A network whose weights are large enough for logits that differ."""
    net = create_net(name, TOKENS, shape, depth=1, **options)
    model = Model(net, shape, dtype="float64", mesh=mesh, pipeline_schedule=schedule or "1f1b")
    rng = np.random.default_rng(1)
    model.load({n: a + 0.1 * rng.normal(size=a.shape) for n, a in sorted(model.state().items())})
    return model


def changed(x: np.ndarray, place: Any) -> np.ndarray:
    """Other tokens at a place."""
    y = x.copy()
    y[:, place] = (y[:, place] + 1) % TOKENS
    return y


def test_masked_tokens_depend_on_all_that_exist_and_on_segments(rng):
    model = made("bert_nano", NETS["bert_nano"])
    x, lengths = rng.integers(TOKENS, size=(2, LENGTH)), np.full((2, 1), 4)
    segments = np.tile([0, 0, 1, 1, 0, 0], (2, 1))
    y = model.predict((x, lengths, segments))
    np.testing.assert_array_equal(
        model.predict((changed(x, 4), lengths, segments))[:, :4], y[:, :4]
    )
    for other in ((changed(x, 3), lengths, segments), (x, lengths, np.zeros_like(segments))):
        assert (abs(model.predict(other)[:, :4] - y[:, :4]).max(axis=-1) > 1e-6).all()
    plain, zeros = made("bert_nano", (LENGTH,)), np.zeros_like(segments)
    np.testing.assert_array_equal(plain.predict(x), model.predict((x, lengths + 2, zeros)))
    classifier = made("bert_nano", (LENGTH,), tokens=TOKENS)
    assert classifier.predict(x).shape == (2, TOKENS)


@each("name", ["transformer_nano", "t5_nano"])
@each("options", [{}, {"tied": False}])
def test_targets_depend_on_no_later_token_and_on_all_of_the_source(name, options, rng):
    if name == "transformer_nano":
        options = {**options, "norm_first": not options, "positions": "learned"}
    model, lengths = made(name, PAIRS, **options), np.full((2, 1), 4)
    x, t = rng.integers(TOKENS, size=(2, 2, LENGTH))
    y = model.predict((x, t, lengths))
    z = model.predict((x, changed(t, 3), lengths))
    np.testing.assert_allclose(z[:, :3], y[:, :3], rtol=0, atol=1e-14)
    assert (abs(z[:, 3:] - y[:, 3:]).max(axis=-1) > 1e-6).all()
    np.testing.assert_array_equal(model.predict((changed(x, slice(4, 6)), t, lengths)), y)
    assert (abs(model.predict((changed(x, 3), t, lengths)) - y).max(axis=-1) > 1e-6).all()


def train(
    comm: Communicator,
    name: str,
    axes: dict[str, int],
    scheme: str | None = None,
    schedule: str | None = None,
    rule: Callable[[], Optimizer] = MOMENTUM,
) -> Any:
    """Train three steps with padding; return losses and parameters."""
    rng, shapes = np.random.default_rng(1), NETS[name]
    highest = (TOKENS, LENGTH, 2) if name == "bert_nano" else (TOKENS, TOKENS, LENGTH)
    x = [rng.integers(0, high, (24, *s)) for high, s in zip(highest, shapes, strict=True)]
    y = rng.integers(TOKENS, size=(24, LENGTH))
    data = ArrayDataset(tuple(part.astype("float32") for part in x), y, ignore_index=0)
    mesh = Mesh(comm, **axes) if scheme is None else None
    loss = CategoricalCrossEntropy(label_smoothing=0.1, ignore_index=0)
    model = made(name, shapes, mesh, schedule, tied=schedule is None)
    options: dict[str, Any] = {"mesh": mesh, "micro_batches": 4 if "pipeline" in axes else None}
    if scheme is not None:
        options = {"exchange": create_scheme(scheme, comm)}
    trainer = Trainer(model, rule(), loss=loss, progress=False, **options)
    trainer.fit(data, epochs=1, global_batch_size=8)
    return trainer.losses, model.state()


@pytest.mark.few(3)
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize(
    ("axes", "how"),
    [
        ({"data": 2}, None),
        ({"tensor": 2}, None),
        ({"data": 2}, "sharded_gradients"),
        ({"data": 2}, "sharded_parameters"),
        ({"pipeline": 3}, "gpipe"),
        ({"data": 2, "pipeline": 2}, "1f1b"),
        ({"pipeline": 4}, "zb_h1"),
        ({"pipeline": 2, "tensor": 2}, "zb_2p"),
        ({"pipeline": 2}, "zb_v"),
    ],
)
def test_training_on_several_ranks_equals_that_on_one(name, axes, how):
    options = {"schedule" if "pipeline" in axes else "scheme": how}
    losses, state = train(Serial(), name, {}, schedule=options.get("schedule"))
    assert losses[-1] != losses[0]
    for own in run_threads(prod(axes.values()), lambda comm: train(comm, name, axes, **options)):
        assert own[0] == pytest.approx(losses, abs=1e-12)
        for key, array in state.items():
            np.testing.assert_allclose(own[1][key], array, rtol=0, atol=1e-12, err_msg=key)


@each("name", NETS)
def test_adam_on_two_ranks_differs_only_in_biases_of_keys_which_have_no_effect(name):
    """Weights of attention do not depend on a bias of keys, so its exact gradient is 0.

    Adam divides rounding errors of gradients by their own size: its steps are arbitrary there.
    """
    losses, state = train(Serial(), name, {}, rule=ADAM)
    for own in run_threads(2, lambda comm: train(comm, name, {"data": 2}, rule=ADAM)):
        assert own[0] == pytest.approx(losses, abs=1e-12)
        for key, array in state.items():
            keys = {"in_proj.b": slice(32, 64), "kv_proj.b": slice(0, 32)}
            where = keys.get(".".join(key.split(".")[-2:]), slice(0))
            for one in (array, own[1][key]):
                one[where] = 0
            np.testing.assert_allclose(own[1][key], array, rtol=0, atol=1e-12, err_msg=key)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NETS)
def test_all_arrays_of_a_step_equal_those_of_serial_training(name):
    net = partial(create_net, name, TOKENS, NETS[name], depth=1)
    check_plan(net, NETS[name], meshes=[{"data": 2}, {"tensor": 2}, {"context": 2}], batch=3)
