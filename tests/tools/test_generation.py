"""Texts that a network continues."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator, run_threads
from pydtnn.layers import (
    Embedding,
    Linear,
    LinearBiases,
    MultiHeadAttention,
    RelativePositions,
    Sequential,
)
from pydtnn.model import Model
from pydtnn.models import create_net
from pydtnn.parallel.mesh import Mesh
from pydtnn.tools.generation import Cached, beam_search, draw, generate
from tests.each import each

TOKENS, LENGTH = 11, 7
NAMES = ("gpt_nano", "llama_nano", "char_lstm")
PAIRS = dict.fromkeys(("transformer_nano", "t5_nano"), ((5,), (LENGTH,), (1,)))


def made(name: str, mesh: Mesh | None = None, backend: Any = "cpu") -> Model:
    """A network whose weights are large enough for logits that differ."""
    options = {"char_lstm": {"width": 8}, "moe_gpt_nano": {"capacity": 0.5}}.get(name, {"depth": 2})
    shape: Any = PAIRS.get(name, (LENGTH,))
    net = create_net(name, TOKENS, shape, **options)
    model = Model(net, shape, dtype="float64", mesh=mesh, backend=backend)
    rng = np.random.default_rng(1)
    model.load({name: a + 0.3 * rng.normal(size=a.shape) for name, a in model.state().items()})
    return model


def after(model: Model, text: np.ndarray) -> np.ndarray:
    """The logits after each text, by a pass over its last positions."""
    window = text[:, -LENGTH:]
    x = np.zeros((len(text), LENGTH))
    x[:, : window.shape[1]] = window
    return model.predict(x)[:, window.shape[1] - 1]


@each("name", NAMES)
def test_without_temperature_each_token_is_the_most_likely_one(name):
    model, begin = made(name), np.array([[1, 2], [7, 0], [3, 3]])
    text = generate(model, begin, 9, temperature=0)  # beyond the length of the model's sequences
    np.testing.assert_array_equal(text[:, :2], begin)
    for n in range(2, text.shape[1]):
        np.testing.assert_array_equal(text[:, n], after(model, text[:, :n]).argmax(axis=-1))
    assert len(np.unique(text)) > 2


@each("name", ["gpt_nano", "llama_nano", "moe_gpt_nano"])
def test_logits_of_one_position_with_a_cache_are_those_of_all_positions(name, backend):
    model = made(name, backend=backend)
    text = np.random.default_rng(2).integers(TOKENS, size=(3, LENGTH))
    assert Cached.fits(model)
    cache = Cached(model, text[:, :2])
    for n in range(2, LENGTH + 1):
        if n > 2:
            cache.add(text[:, n - 1])
        np.testing.assert_allclose(cache.logits, after(model, text[:, :n]), rtol=0, atol=1e-12)


@each(
    "options",
    [
        {"window": 2, "scale": 0.9},
        {"positions": LinearBiases()},
        {"positions": RelativePositions(4, 3, bidirectional=False, initializer="glorot_uniform")},
    ],
)
def test_masks_and_biases_of_one_position_are_those_of_all(options, backend):
    attention = MultiHeadAttention(2, causal=True, **options)
    net = Sequential(Embedding(TOKENS, 6), attention, Linear(TOKENS))
    model = Model(net, (LENGTH,), dtype="float64", backend=backend)
    text = np.random.default_rng(2).integers(TOKENS, size=(3, LENGTH))
    assert Cached.fits(model)
    cache = Cached(model, text[:, :1])
    for n in range(2, LENGTH + 1):
        cache.add(text[:, n - 1])
        np.testing.assert_allclose(cache.logits, after(model, text[:, :n]), rtol=0, atol=1e-12)


def test_a_seed_gives_the_same_texts_and_another_one_others():
    model, begin = made("llama_nano"), np.tile([4, 1], (8, 1))
    texts = generate(model, begin, 8, seed=3)
    np.testing.assert_array_equal(generate(model, begin, 8, seed=3), texts)
    np.testing.assert_array_equal(generate(model, [4, 1], 8, seed=3), texts[0])
    np.testing.assert_array_equal(generate(model, texts[:, :5], 5, seed=3), texts)  # in two parts
    assert len(np.unique(texts, axis=0)) > 4
    assert (generate(model, begin, 8, seed=4) != texts).any()


@each(
    ("options", "expected"),
    [
        ({}, [0.5, 0.25, 0.15, 0.1]),
        ({"temperature": 0.5}, np.square([0.5, 0.25, 0.15, 0.1]) / 0.345),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_k": 9}, [0.5, 0.25, 0.15, 0.1]),
        ({"top_p": 0.7}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.76}, [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.8}, [2 / 3, 1 / 3, 0, 0]),  # 0.75 / 0.9 is enough
        ({"temperature": 0}, [1, 0, 0, 0]),
    ],
)
def test_tokens_are_drawn_with_the_probabilities_of_those_that_are_left(options, expected):
    places = [2, 0, 3, 1]  # of the tokens, from the most to the least likely
    logits = np.empty(4)
    logits[places] = np.log([0.5, 0.25, 0.15, 0.1]) + 7
    count = 1000
    numbers = (np.arange(count) + 0.5) / count
    assert draw(np.array([[1.0, 3.0, 3.0]]), np.array([0.99]), top_k=1) == [1]  # the first one
    drawn = draw(np.tile(logits, (count, 1)), numbers, **options)
    found = np.bincount(drawn, minlength=4)[places] / count
    np.testing.assert_allclose(found, expected, rtol=0, atol=1 / count)


def hypotheses(model: Model, begin: Any, source: Any, beams: int) -> Any:
    """Those of a search with lists, of three tokens, of which 2 is the end; the exponent is 0.8."""
    kept: list[Any] = [((), 0.0)]
    for n in range(len(begin), len(begin) + 3):
        done, more = [h for h in kept if 2 in h[0]], []
        for text, total in (h for h in kept if 2 not in h[0]):
            x = np.array([[*begin, *text, *[0] * (LENGTH - n)]])
            logits = model.predict((*source[:1], x, *source[1:]))[0, n - 1]
            logs = logits - np.log(np.exp(logits).sum())
            more += [((*text, k), total + logs[k]) for k in range(TOKENS)]
        kept = done + sorted(more, key=lambda h: -h[1])[: beams - len(done)]
    ended = [((*h, 2, 2)[:3], s / ((5 + len(h)) / 6) ** 0.8) for h, s in kept]
    return zip(*sorted(ended, key=lambda h: -h[1]), strict=True)


@each("name", ["gpt_nano", "char_lstm", *PAIRS])
@each(("beams", "factor"), [(3, 1), (TOKENS**3, 1), (3, 0)])  # without weights texts are alike
def test_beams_are_those_of_a_search_with_lists_or_all_texts(name, beams, factor):
    model, begin = made(name), np.array([[1, 0], [3, 1]])
    model.load({name: factor * a for name, a in model.state().items()})
    source = (np.arange(10).reshape(2, 5), np.array([[5], [3]])) if name in PAIRS else ()
    run = partial(beam_search, model, count=3, beams=beams, length_penalty=0.8, end=2)
    both = run(begin, source=source or None)
    for n, tokens, scores in zip(range(2), *both, strict=True):
        own = tuple(part[n : n + 1] for part in source)
        for alone, part in zip(run(begin[n], source=own or None), (tokens, scores), strict=True):
            np.testing.assert_allclose(alone, part, rtol=0, atol=1e-12)
        expected, sums = hypotheses(model, begin[n], own, beams)
        assert np.isfinite(scores).sum() == len(sums) == min(beams, 1 + 10 + 100 + 1000)
        np.testing.assert_array_equal(tokens[: len(sums), 2:], expected)
        np.testing.assert_allclose(scores[: len(sums)], sums, rtol=0, atol=1e-12)


@each("name", NAMES)
@each("end", [None, 3])
def test_one_beam_is_the_text_without_temperature_until_its_end(name, end):
    model, begin = made(name), np.array([[1, 2], [7, 0], [3, 3]])
    expected = generate(model, begin, 9, temperature=0)  # beyond the model's sequences
    expected[:, 2:][np.cumsum(expected[:, 2:] == end, axis=1) > 0] = end or 0
    np.testing.assert_array_equal(beam_search(model, begin, 9, beams=1, end=end)[0][:, 0], expected)


@each(
    ("name", "options", "message"),
    [
        ("gpt_nano", {"source": [[1]]}, r"a model of a source and tokens \(T,\) to logits"),
        ("t5_nano", {}, r"a model of tokens .*, got one of \(5,\) and \(7,\) and \(1,\) to"),
        ("t5_nano", {"source": [[1] * 5]}, r"expected .*, got \(1, 5\) and \(1, 7\)"),
        ("t5_nano", {"source": [[1] * 5], "count": 8}, "count must be at most 7, got 8"),
    ],
)
def test_invalid_arguments_of_a_search_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        beam_search(made(name), [1], **{"count": 2, **options})


def test_all_ranks_of_a_mesh_get_the_texts_of_one():
    run = partial(generate, tokens=[5, 2, 8], count=6, seed=1)
    expected = run(made("llama_nano"))

    def rank(comm: Communicator) -> np.ndarray:
        return run(made("llama_nano", Mesh(comm, tensor=2)))

    for text in run_threads(2, rank):
        np.testing.assert_array_equal(text, expected)


@each(
    ("tokens", "options", "message"),
    [
        ([], {}, r"at least one of each text, got float64 of shape \(0,\)"),
        ([1.0], {}, r"integers in 0\.\.10 .*, got float64 of shape \(1,\)"),
        (np.ma.array([1, 2], mask=[0, 1]), {}, "tokens must be an array without a mask"),
        ([3, 11], {}, r"got int64 of shape \(2,\) in 3\.\.11"),
        ([1], {"temperature": -1}, "generate: temperature must be at least 0, got -1"),
        ([1], {"top_k": 0}, "generate: top_k must be at least 1, got 0"),
        ([1], {"top_p": 0}, "generate: top_p must be above 0"),
    ],
)
def test_invalid_arguments_are_refused(tokens, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        generate(made("gpt_nano"), tokens, 1, **options)


def test_networks_that_do_not_predict_the_next_token_are_refused():
    both = Sequential(Embedding(5, 4), MultiHeadAttention(2, name="a"), Linear(5))
    with pytest.raises(ValueError, match=r"a\.attention looks ahead; use causal layers"):
        generate(Model(both, (6,), backend="numpy"), [1], 1)
    with pytest.raises(ValueError, match=r"of tokens \(T,\) to logits \(T, K\), got one of \(6,\)"):
        generate(Model(Linear(5), (6,), backend="numpy"), [1], 1)
