"""What no layer can be made of, or be given: one sentence, when the model is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pydtnn import layers as nn
from pydtnn.model import Model
from tests.each import each

Case = tuple[Callable[..., Any], Any, str]

ROWS, IMAGE = (3, 4), (8, 8, 3)
LENGTHS = [(5, 4), (1,)]
tied = nn.Embedding(7, 4, tied=True)

OPTIONS: list[Case] = [
    (lambda: nn.Conv2d(4, 3, padding=4), IMAGE, "padding .* smaller than kernel 3.* padding=1"),
    (lambda: nn.Conv2d(4, 3, padding=-1), IMAGE, "padding must be an int, .* got -1"),
    (lambda: nn.Conv2d(4, 3, padding="sane"), IMAGE, "padding must be .* \"same\" .* got 'sane'"),
    (lambda: nn.Conv2d(4, 3, padding=(1, 2, 3)), IMAGE, "padding must be an int"),
    (lambda: nn.Conv2d(4, 3, padding=1.0), IMAGE, r"padding must be an int.* got 1\.0"),
    (lambda: nn.Conv2d(4, 9), IMAGE, "kernel 9 must have .* at most the padded input 8"),
    (lambda: nn.Conv2d(4, 3, dilation=4), IMAGE, "kernel 3 must have an extent .* got 9"),
    (lambda: nn.Conv2d(4, 3, groups=2), IMAGE, "divisible by groups=2, got 3 channels"),
    (lambda: nn.Conv2d(4, 3, groups=3), IMAGE, "divisible by groups=3, .* 4 filters"),
    (lambda: nn.Conv2d(0, 3), IMAGE, "Conv2d: filters must be at least 1, got 0"),
    (lambda: nn.Conv2d(4, 3, groups=0), IMAGE, "groups must be at least 1, got 0"),
    (lambda: nn.Conv2d(4, 0), IMAGE, "kernel_size must be a positive int or 2 of them, got 0"),
    (lambda: nn.Conv2d(4, (3, 3, 3)), IMAGE, "kernel_size must be a positive int or 2 of them"),
    (lambda: nn.Conv2d(4, 3, stride=1.5), IMAGE, r"stride must be a positive int .* got 1\.5"),
    (lambda: nn.Conv2d(4, 3, dilation=(1, -1)), IMAGE, "dilation must be"),
    (lambda: nn.Conv2d(4, 3), (784,), r"^conv2d: .* input of shape \(H, W, C\)"),
    (lambda: nn.Conv1d(4, 3), IMAGE, r"Conv1d: .* input of shape \(L, C\), got \(8, 8, 3\)"),
    (lambda: nn.Conv1d(4, (3, 3)), (8, 3), "kernel_size must be a positive int or 1 of them"),
    (lambda: nn.Conv1d(3, 16, 3), (8, 3), "the size of the input is known"),
    (lambda: nn.Conv1d(16, 3, strides=2), (8, 3), "did you mean 'stride'"),
    (lambda: nn.AvgPool1d(2, count_include_pad=True), (8, 3), "choose one of 'count_padding'"),
    (lambda: nn.Conv3d(4, 3), IMAGE, r"Conv3d: .* input of shape \(D, H, W, C\)"),
    (lambda: nn.MaxPool3d(2, stride=(1, 2)), (8, 8, 8, 3), "stride must be .* 3 of them"),
    (lambda: nn.MaxPool2d(9), IMAGE, "MaxPool2d: kernel 9 .* at most the padded input 8"),
    (lambda: nn.AdaptiveAvgPool2d(9), IMAGE, r"output_size must be at most the input \(8, 8\)"),
    (lambda: nn.GlobalAvgPool2d(), ROWS, r"GlobalAvgPool2d: .* input of shape \(H, W, C\)"),
    (lambda: nn.ConvTranspose2d(2, 3, stride=2, output_padding=2), IMAGE, "below stride"),
    (lambda: nn.ConvTranspose2d(2, 3, padding="same"), IMAGE, 'padding must be ints or "valid"'),
    (lambda: nn.ConvTranspose2d(2, 3, padding=2), (1, 1, 2), "must leave some of the output"),
    (lambda: nn.Upsample(2.5), IMAGE, r"Upsample: factor must be a positive int .* got 2\.5"),
    (lambda: nn.Upsample(2, "bilinaer"), IMAGE, "unknown mode .* did you mean 'bilinear'"),
    (lambda: nn.GroupNorm(2), ROWS[:1], "channels must be divisible by groups=2, got 3"),
    (lambda: nn.GroupNorm(0), ROWS, "GroupNorm: groups must be at least 1, got 0"),
    (lambda: nn.LayerNorm(axes=3), ROWS, r"axes must be at most those of the input \(3, 4\)"),
    (lambda: nn.LayerNorm(epsilon=-1), ROWS, "epsilon must be above 0, got -1"),
    (lambda: nn.BatchNorm(momentum=0), ROWS, "momentum must be above 0 and at most 1, got 0"),
    (lambda: nn.LocalResponseNorm(0), IMAGE, "size must be at least 1, got 0"),
    (lambda: nn.LocalResponseNorm(5, k=0), IMAGE, "k must be above 0, got 0"),
    (lambda: nn.LocalResponseNorm(5, alpha=-1), IMAGE, "alpha must be at least 0, got -1"),
    (lambda: nn.ELU(0), ROWS, "ELU: alpha must be above 0, got 0"),
    (lambda: nn.Dropout(1.0), ROWS, "rate must be at least 0 and below 1"),
    (lambda: nn.Dropout(float("nan")), ROWS, "rate must be at least 0 and below 1"),
    (lambda: nn.Linear(0), ROWS, "Linear: features must be at least 1, got 0"),
    (lambda: nn.Linear(2.5), ROWS, r"features must be a whole number, got 2\.5"),
    (lambda: nn.Linear(3), (), "Linear: expected an input of at least 1 axes"),
    (lambda: nn.Linear(3, initializer="he_norml"), ROWS, "^linear: .* did you mean 'he_normal'"),
    (lambda: nn.Reshape((5, -1)), ROWS, r"as many elements as \(3, 4\), got \(5, -1\)"),
    (lambda: nn.Reshape((-1, -1)), ROWS, r"as many elements as \(3, 4\), got \(-1, -1\)"),
    (lambda: nn.Reshape((0, -1)), ROWS, "a tuple of positive ints"),
    (lambda: nn.Reshape(12), ROWS, "a tuple of positive ints, one may be -1, got 12"),
    (lambda: nn.Pad(((1, 1),)), ROWS, "one pair for each of the 2 axes"),
    (lambda: nn.Pad(((1, -1), (0, 0))), ROWS, "pairs of non-negative ints"),
    (lambda: nn.Pad(1), ROWS, "pairs of non-negative ints, got 1"),
    (lambda: nn.Slice(slice(3, None)), ROWS, "must select elements of the input"),
    (lambda: nn.Slice(*[slice(None)] * 3), ROWS, "at most one slice per axis"),
    (lambda: nn.Slice(slice(None, None, -1)), ROWS, "slices with positive steps"),
    (lambda: nn.Slice(2), ROWS, "slices with positive steps"),
    (lambda: nn.Transpose((1, 1)), ROWS, "a permutation"),
    (lambda: nn.Transpose((0,)), ROWS, "axes must be those of the input"),
    (nn.Add, [(3,), (4,)], r"Add: inputs must be .* got \(3,\) and \(4,\)"),
    (nn.Add, (3,), "Add: inputs must be two or more"),
    (nn.Concat, [(2, 3), (3, 3)], "equal shapes except along axis 1"),
    (lambda: nn.Concat(2), [(2, 3), (3, 3)], "Concat: axis must exist"),
    (nn.Multiply, [(3,), (4,)], "second input must have the sizes of the first"),
    (nn.Multiply, [(3,), (3, 1)], "two with equally many axes"),
    (lambda: nn.Sequential(nn.Linear(3)), [(3,), (4,)], "expected one input, got 2; merge them"),
    (nn.ClassToken, (5,), r"ClassToken: .* input of shape \(T, D\)"),
    (nn.PositionalEmbedding, (5,), r"PositionalEmbedding: .* input of shape \(T, D\)"),
    (lambda: nn.Sequential(tied, nn.Linear(5), tied), (3,), "vectors of 4 features"),
    (lambda: nn.MultiHeadAttention(4), (5, 6), "heads must divide the 6 features"),
    (lambda: nn.MultiHeadAttention(0), (5, 6), "heads must be at least 1"),
    (lambda: nn.MultiHeadAttention(2), (6,), r"one input of shape \(T, D\)"),
    (lambda: nn.MultiHeadAttention(1, causal=1), (5, 6), "causal must be true or false, got 1"),
    (lambda: nn.MultiHeadAttention(2), [(5, 4), (4,)], r"lengths of shape \(1,\), got \(4,\)"),
    (lambda: nn.DotProductAttention(2), (5, 9), "D a multiple of heads=2"),
    (lambda: nn.DotProductAttention(1, dropout=1.0), (5, 6), "dropout must be at least 0"),
    (lambda: nn.DotProductAttention(1, window=0), (5, 6), "window must be at least 1"),
    (lambda: nn.DotProductAttention(1, scale=0.0), (5, 6), "scale must be above 0"),
    (lambda: nn.DotProductAttention(1, positions=8), (5, 6), "must be LinearBiases, .* got 8"),
    (lambda: nn.CrossAttention(2), [(5, 6), (4, 6)], r"keys and values \(T2, 2 D\), .*heads=2"),
    (lambda: nn.CrossAttention(2), (5, 6), r"expected queries \(T1, D\)"),
    (lambda: nn.MultiHeadCrossAttention(2), [(5, 6)], r"a sequence \(T2, D2\)"),
    (lambda: nn.RelativePositions(3), (5, 6), "buckets must be at least 4"),
    (lambda: nn.RelativePositions(8, 4), (5, 6), "distance must be at least 5"),
    (nn.PositionalEmbedding, [(5, 2), (4,)], r"documents of shape \(5,\), got \(4,\)"),
    (lambda: nn.Rotary(1), [(5, 2)] * 4, r"documents of shape \(5,\), got \(5, 2\)"),
    (lambda: nn.Rotary(2), [ROWS], r"queries \(T, H E\), keys .*, got \(3, 4\)"),
    (lambda: nn.Rotary(2), [(3, 6), (3, 3), (3, 3)], "with H=2 and E even"),
    (lambda: nn.Rotary(4), [(3, 16), (3, 12), (3, 12)], "a multiple of those of keys"),
    (lambda: nn.Rotary(2), [(3, 8), (4, 8), (4, 8)], r"got \(3, 8\), \(4, 8\)"),
    (lambda: nn.LSTM(4), IMAGE, r"LSTM: expected one input of shape \(T, features\)"),
    (lambda: nn.GRULayer(4), (8,), r"GRULayer: .* input of shape \(T, features\)"),
    (lambda: nn.GRU(4), [(8, 2), (2,)], r"lengths of shape \(1,\) if they differ"),
    (lambda: nn.GRU(4), [(8, 2), (4,), (4,)], r"either no states or 1, of shape \(4,\), got \(8"),
    (lambda: nn.LSTM(4), [(8, 2), (1,), (4,), (3,)], r"no states or 2, .* and \(3,\)"),
    (lambda: nn.LSTM(4, dropout=1.0), ROWS, "dropout must be at least 0 and below 1, got 1"),
    (lambda: nn.LSTM(0), ROWS, "LSTM: features must be at least 1, got 0"),
    (lambda: nn.LSTM(8, 16), ROWS, "the size of the input is known"),
    (lambda: nn.GRU(16, num_layers=2), ROWS, "did you mean 'layers'"),
    (lambda: nn.Experts(3), [(4, 2)], r"Experts: expected tokens \(T, D\)"),
    (lambda: nn.Experts(3), [(4, 2), (5, 3)], r"got \(4, 2\) and \(5, 3\)"),
    (lambda: nn.Experts(3, choices=4), [(4, 2), (4, 3)], "at most .* experts, 3, got 4"),
    (lambda: nn.MixtureOfExperts(2, 3), [(4, 2), (4, 2)], "one input, got 2"),
    (lambda: nn.Experts(0), [], "hidden must be at least 1, got 0"),
    (lambda: nn.Experts(2, choices=0), [], "choices must be at least 1, got 0"),
    (lambda: nn.Experts(2, capacity=0.0), [], "capacity must be above 0"),
    (lambda: nn.Experts(2, balance=-1), [], "balance must be at least 0"),
    (lambda: nn.Experts(2, z=-1), [], "z must be at least 0"),
]


@each(("make", "shape", "words"), OPTIONS)
def test_options_and_inputs_that_do_not_fit_are_refused(make, shape, words):
    with pytest.raises((TypeError, ValueError), match=words):
        Model(make(), shape, backend="numpy")


@each("make", [lambda: nn.MultiHeadAttention(2), lambda: nn.LSTM(4)])
def test_models_of_16_bits_have_no_lengths(make):
    with pytest.raises(ValueError, match="float32 or float64, which represent all lengths"):
        Model(make(), LENGTHS, backend="numpy", dtype="bfloat16")


@each("layer", [nn.Dropout(0.4), nn.DotProductAttention(1, dropout=0.4)])
def test_random_masks_require_the_samples(layer):
    model = Model(layer, (2, 3), backend="numpy")
    with pytest.raises(ValueError, match=f"{type(layer).__name__}: training requires the ids"):
        model.forward(np.ones((2, 2, 3), "float32"), nn.StepContext(training=True))


@each("make", [lambda: nn.MultiHeadAttention(2), lambda: nn.LSTM(4)])
@each("wrong", [6, -1, 2.5, np.nan])
def test_numbers_that_are_no_lengths_are_named_with_the_sample(make, wrong):
    model = Model(make(), LENGTHS, backend="cpu", dtype="float64")
    lengths = np.array([[3.0], [5], [wrong], [1]])
    context = nn.StepContext(training=False, samples=np.array([7, 8, 30, 9]))
    with pytest.raises(ValueError, match=rf"in 0\.\.5, got {wrong:g} of sample 30"):
        model.forward((np.zeros((4, 5, 4)), lengths), context)
