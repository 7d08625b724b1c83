import numpy as np

from pydtnn.parallel.compression.floats import code_type, pack_bits, unpack_bits
from tests.each import each


@each("width", range(1, 33))
@each("count", [0, 1, 7, 8, 9, 101])
def test_codes_come_back_from_as_few_bytes_as_hold_them(width, count, rng):
    codes = rng.integers(0, 2**width, count).astype(code_type(width))
    packed = pack_bits(codes, width)
    assert packed.dtype == np.uint8
    assert packed.size == -(-width * count // 8)
    again = unpack_bits(packed, width, count)
    assert again.dtype == codes.dtype
    np.testing.assert_array_equal(again, codes)


@each("width", [1, 3, 11, 13, 27])
def test_the_most_significant_bit_comes_first(width, rng):
    codes = rng.integers(0, 2**width, 37).astype(code_type(width))
    bits = "".join(f"{code:0{width}b}" for code in codes)
    written = "".join(f"{byte:08b}" for byte in pack_bits(codes, width))
    assert written[: len(bits)] == bits
    assert "1" not in written[len(bits) :]
