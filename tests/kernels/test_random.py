"""Counter-based random numbers: published vectors, the same bits everywhere, dropout."""

import numpy as np

from pydtnn.kernels.reference.random import bits, philox4x32, stream, uniform

# Salmon et al.'s library Random123, file kat_vectors, lines "philox4x32 10": counter, key, result
VECTORS = """
00000000 00000000 00000000 00000000  00000000 00000000  6627e8d5 e169c58d bc57ac4c 9b00dbd8
ffffffff ffffffff ffffffff ffffffff  ffffffff ffffffff  408f276d 41c83b0e a20bc7c6 6d5451fd
243f6a88 85a308d3 13198a2e 03707344  a4093822 299f31d0  d16cfe09 94fdcceb 5001e420 24126ea1
"""


def test_philox_gives_the_published_numbers():
    numbers = np.array([int(word, 16) for word in VECTORS.split()], "uint32").reshape(3, 10)
    counter, key, result = np.split(numbers, [4, 6], axis=1)
    np.testing.assert_array_equal(philox4x32(counter, key), result)


def test_bits_of_a_sample_depend_on_nothing_but_their_keys():
    alone = bits(1, 2, 3, np.array([2**40 + 7]), 10)
    among = bits(1, 2, 3, np.array([5, 2**40 + 7, 6]), 99)
    np.testing.assert_array_equal(alone[0], among[1, :10])
    for other in ((0, 2, 3, 2**40 + 7), (1, 0, 3, 2**40 + 7), (1, 2, 0, 2**40 + 7), (1, 2, 3, 7)):
        assert not np.any(alone == bits(*other[:3], np.array([other[3]]), 10))


def test_uniform_numbers_have_the_moments_of_a_uniform_distribution():
    u = uniform(0, stream("layer"), 0, np.arange(1000), 100)
    # standard errors: 0.0009 and 0.00024
    assert abs(u.mean() - 0.5) < 0.004
    assert abs(u.var() - 1 / 12) < 0.001
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(np.corrcoef(u[:, 0], u[:, 1])[0, 1]) < 0.12


def test_stream_of_a_name_never_changes():
    assert stream("blocks.3.dropout") == 0x76AE11E3


def test_dropout_keeps_its_share_and_the_mean(cpu_backend):
    x, y = np.ones((100, 1000), "float32"), np.empty((100, 1000), "float32")
    cpu_backend.random.dropout(x, 0.3, 1, 2, 3, np.arange(100), out=y)
    assert set(np.unique(y)) == {np.float32(0), np.float32(1 / 0.7)}
    # the standard error of the share of 100,000 is 0.0015
    assert abs((y > 0).mean() - 0.7) < 0.006


def test_dropped_nan_is_dropped_and_kept_nan_is_kept(cpu_backend):
    x, y = np.full((1, 999), np.nan, "float32"), np.empty((1, 999), "float32")
    cpu_backend.random.dropout(x, 0.5, 1, 2, 3, np.arange(1), out=y)
    expected = np.where(bits(1, 2, 3, np.arange(1), 999) >= 2**31, np.nan, 0)
    np.testing.assert_array_equal(y, expected)
