"""Images of uint8, resized or turned into float32: wrapper of src/pixels.h, without the GIL."""

from libc.stdint cimport uint8_t

from pydtnn.utils cimport ndarray as cnp
from pydtnn.kernels.cpu.arrays cimport data, output

cnp.import_array()

cdef extern from "pixels.h":
    int pixels_resize(const uint8_t *image, ptrdiff_t image_height, ptrdiff_t image_width,
                      ptrdiff_t channels, ptrdiff_t top, ptrdiff_t left, ptrdiff_t box_height,
                      ptrdiff_t box_width, ptrdiff_t height, ptrdiff_t width,
                      uint8_t *out) noexcept nogil
    void pixels_look_up(const uint8_t *x, ptrdiff_t n, ptrdiff_t channels, const float *table,
                        float *out) noexcept nogil

cdef enum:
    MAX_SIDE = 1 << 24  # products of sides and taps fit


def resize(image, box, out):
    """Resize a box of an image as Pillow does, bilinear.

    `image` and `out` are C-contiguous uint8 ``(H, W, C)`` with at most 4 channels, `box` is (left,
    top, right, bottom) in pixels.
    """
    cdef ptrdiff_t height = image.shape[0], width = image.shape[1], channels = image.shape[2]
    cdef ptrdiff_t rows = out.shape[0], columns = out.shape[1]
    cdef ptrdiff_t left, top, right, bottom
    left, top, right, bottom = box
    if (
        not (0 <= left < right <= width <= MAX_SIDE and 0 <= top < bottom <= height <= MAX_SIDE)
        or not (1 <= channels <= 4 and 1 <= rows <= MAX_SIDE and 1 <= columns <= MAX_SIDE)
    ):
        raise ValueError(f"resize: no box {box} of {image.shape} can become {out.shape}.")
    cdef const uint8_t *image_ = <const uint8_t *>data(image, 1, height * width * channels)
    cdef uint8_t *out_ = <uint8_t *>output(out, 1, rows * columns * channels)
    cdef int status
    with nogil:
        status = pixels_resize(
            image_, height, width, channels, top, left, bottom - top, right - left, rows, columns,
            out_
        )
    if status != 0:
        raise MemoryError("resize: no memory for a few rows of the image.")


def look_up(x, table, out):
    """out = table[c, x] for uint8 x of c channels, the last axis; table and out are float32."""
    cdef ptrdiff_t n = cnp.PyArray_SIZE(x), channels = table.shape[0]
    cdef const uint8_t *x_ = <const uint8_t *>data(x, 1, n)
    cdef const float *table_ = <const float *>data(table, 4, 256 * channels)
    cdef float *out_ = <float *>output(out, 4, n)
    if channels < 1 or n % channels != 0:
        raise ValueError(f"look_up: {x.shape} are no pixels of {channels} channels.")
    with nogil:
        pixels_look_up(x_, n // channels, channels, table_, out_)
