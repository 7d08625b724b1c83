"""GPT: what its logits depend on, and that it learns."""

from __future__ import annotations

import numpy as np
import pytest

from pydtnn import Trainer
from pydtnn.comm import run_threads
from pydtnn.data import TokenDataset
from pydtnn.model import Model
from pydtnn.models import create_net, gpt
from pydtnn.optimizers import AdamW
from pydtnn.parallel.schemes import create_scheme
from tests.each import each

PATTERN = np.tile([0, 3, 1, 1, 4, 2, 3, 0, 2], 60)
"""The token after 0, 1 or 3 depends on the tokens before it."""


@each("name", ["gpt_nano", "llama_nano"])
def test_logits_depend_on_no_later_token(name, rng):
    model = Model(create_net(name, 11, (9,)), (9,), backend="cpu", dtype="float64")
    x = rng.integers(11, size=(2, 9)).astype("float64")
    changed = x.copy()
    changed[:, 5:] = (x[:, 5:] + 1) % 11
    y, z = model.predict(x), model.predict(changed)
    np.testing.assert_allclose(z[:, :5], y[:, :5], rtol=0, atol=1e-15)
    assert (abs(z[:, 5:] - y[:, 5:]) > 1e-6).any(axis=-1).all()


def train(comm=None, dtype="float64", epochs=3):
    data = TokenDataset(PATTERN, 12)
    model = Model(gpt(5, (12,), depth=1, heads=2, width=16), (12,), dtype=dtype)
    exchange = None if comm is None else create_scheme("allreduce", comm)
    trainer = Trainer(model, AdamW(lr=0.01), metrics=["accuracy", "perplexity"], exchange=exchange)
    trainer.fit(data, epochs=epochs, global_batch_size=8)
    return trainer.evaluate(data), model.state()


def test_a_pattern_is_learned_from_the_tokens_before():
    found, _ = train(epochs=30, dtype="float32")
    assert found["accuracy"] > 0.9
    assert found["perplexity"] == pytest.approx(np.exp(found["loss"]), rel=1e-5)
    assert found["perplexity"] < 1.4


def test_two_ranks_train_as_one():
    (found, state), _ = run_threads(2, train)
    alone, expected = train()
    assert found["perplexity"] == pytest.approx(alone["perplexity"], rel=1e-9)
    for name, value in expected.items():
        np.testing.assert_allclose(state[name], value, rtol=1e-7, atol=1e-10, err_msg=name)


def test_images_are_refused():
    with pytest.raises(ValueError, match=r"sequences of tokens, of shape \(T,\), got \(8, 8, 1\)"):
        create_net("gpt", 10, (8, 8, 1))
