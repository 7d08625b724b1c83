from __future__ import annotations

import importlib
import io
import os
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pydtnn.data import pixels as pixels_module
from pydtnn.data.images import Decoder
from tests.each import each

image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: the extra `data`")


def encoded(
    pixels: NDArray[Any], kind: str = "PNG", mode: str | None = None, **options: Any
) -> bytes:
    """The content of a file with these pixels, converted to a mode of Pillow first."""
    file, made = io.BytesIO(), image.fromarray(pixels)
    (made if mode is None else made.convert(mode)).save(file, kind, **options)
    return file.getvalue()


@pytest.fixture
def pixels(rng: np.random.Generator) -> NDArray[np.uint8]:
    return rng.integers(0, 256, (7, 11, 3)).astype(np.uint8)


def test_a_png_has_the_pixels_that_were_written(pixels):
    found = Decoder("test")(encoded(pixels), "a.png")
    np.testing.assert_array_equal(found, pixels)
    found[0] = 0  # augmentation changes samples in place


def random_jpeg(rng: np.random.Generator) -> bytes:
    """A JPEG of any size, colours and options, of which some are cut off."""
    height, width = (int(n) for n in rng.integers(1, rng.choice([20, 160, 400]), 2))
    mode = str(rng.choice(["RGB", "L", "CMYK"], p=[0.7, 0.2, 0.1]))
    blocks = rng.integers(0, 256, (max(height // 5, 1), max(width // 5, 1), 3)).astype(np.uint8)
    picture = image.fromarray(blocks).resize((width, height)).convert(mode)
    file = io.BytesIO()
    options = {"quality": int(rng.integers(20, 100)), "progressive": bool(rng.integers(2))}
    if mode == "RGB":
        options["subsampling"] = int(rng.integers(0, 3))
    picture.save(file, "JPEG", **options)
    data = file.getvalue()
    return data if rng.integers(10) else data[: int(rng.integers(3, len(data)))]


def test_simplejpeg_decodes_to_the_pixels_and_errors_of_pillow(rng, monkeypatch):
    pytest.importorskip("simplejpeg", reason="simplejpeg is not installed: the extra `data`")
    fast = 0
    for _ in range(300):
        data, side = random_jpeg(rng), int(rng.integers(1, 80))
        size = [None, side, (side, int(rng.integers(1, 80)))][rng.integers(3)]
        decoder = Decoder("test", size=size, channels=int(rng.choice([1, 3, 4])))
        found = []
        for available in (True, False):
            with monkeypatch.context() as patch:
                if not available:
                    patch.setattr("pydtnn.data.images._simplejpeg", lambda: None)
                fast += decoder._jpeg(data) is not None
                try:
                    found.append(decoder(data, "a.jpg"))
                except ValueError as error:
                    found.append(np.array(str(error)))
        np.testing.assert_array_equal(*found)
        assert found[0].flags.writeable
    assert fast > 60


def test_compiled_pixels_are_those_of_pillow_and_numpy(rng, monkeypatch):
    """Of sides from 1 to 150, boxes anywhere, and black and white at the limits."""
    compiled = pixels_module.resize, pixels_module.look_up
    monkeypatch.setitem(sys.modules, "pydtnn.utils._pixels", None)
    plain = importlib.reload(pixels_module)
    references = plain.resize, plain.look_up
    monkeypatch.undo()
    importlib.reload(pixels_module)
    for channels in [1, 3] * 60:
        height, width, rows, columns = (int(n) for n in np.exp(rng.uniform(0, 5, 4)).round())
        x = rng.integers(0, 256, (height, width, channels)).astype(np.uint8)
        x = x if rng.integers(4) else x // 128 * 255
        left, right = sorted(int(n) for n in rng.choice(width + 1, 2, replace=False))
        top, bottom = sorted(int(n) for n in rng.choice(height + 1, 2, replace=False))
        table = rng.normal(size=(channels, 256)).astype(np.float32)
        found = []
        for resize, look_up in (compiled, references):
            small, wide = np.empty((rows, columns, channels), np.uint8), np.empty(x.shape, "f4")
            resize(x, (left, top, right, bottom), small)
            look_up(x, table, wide)
            found.append((small, wide))
        for ours, reference in zip(*found, strict=True):
            np.testing.assert_array_equal(ours, reference)
    for box in ((0, 0, width + 1, 1), (-1, 0, 1, 1), (1, 0, 1, 1), (0, 2**62, 1, 2**63 - 1)):
        with pytest.raises(ValueError, match="no box"):
            compiled[0](x, box, small)
    with pytest.raises(ValueError, match="elements"):
        compiled[1](x, table, wide[:0])


@each("mode", ["1", "L", "LA", "P", "P, transparent", "RGBA"])
@each("channels", [1, 3, 4])
def test_images_of_any_mode_get_the_channels_asked_for(pixels, mode, channels):
    mode, transparent, _ = mode.partition(", ")
    options = {"transparency": b"\xff\x80"} if transparent else {}
    found = Decoder("test", channels=channels)(encoded(pixels, mode=mode, **options), "a.png")
    assert (found.shape, found.dtype) == ((7, 11, channels), np.uint8)
    if channels == 4:
        assert (found[..., 3] == 255).all()
    if channels > 1 and mode in ("1", "L"):
        assert (found[..., 1:3] == found[..., :1]).all()


@each("shape", [(7, 11), (11, 7), (7, 7), (8, 7)])
def test_the_centre_of_an_image_whose_short_side_fits_is_cropped(rng, shape):
    pixels = rng.integers(0, 256, (*shape, 3)).astype(np.uint8)
    top, left = ((extent - 7) // 2 for extent in shape)
    found = Decoder("test", size=7)(encoded(pixels), "a.png")
    np.testing.assert_array_equal(found, pixels[top : top + 7, left : left + 7])


@each("kind", ["PNG", "JPEG"])
@each("size", [3, 10, 64, 200])
def test_an_image_is_resized_by_its_short_side(kind, size):
    """Columns of a wide ramp: in the crop, values rise from 64 to 192."""
    ramp = np.tile(np.linspace(0, 255, 128), (64, 1)).astype(np.uint8)
    found = Decoder("test", size=size, channels=1)(encoded(ramp, kind), "a")[..., 0]
    assert found.shape == (size, size)
    expected = 255 * (32 + (np.arange(size) + 0.5) * 64 / size) / 128
    # JPEG rounds frequencies; the filter shortens the ramp at its ends by at most a pixel.
    np.testing.assert_allclose(found, np.tile(expected, (size, 1)), rtol=0, atol=6)


@each("channels", [1, 3, 4])
def test_of_16_bits_the_upper_8_are_used(rng, channels):
    wide = rng.integers(0, 2**16, (7, 11)).astype(np.uint16)
    found = Decoder("test", channels=channels)(encoded(wide), "a.png")
    colours = [wide >> 8] * min(channels, 3) + [np.full_like(wide, 255)] * (channels == 4)
    np.testing.assert_array_equal(found, np.stack(colours, axis=-1))


@each("number", range(10))
@each("kind", ["PNG", "JPEG", "WEBP"])
@each("size", [None, (6, 9), (3, 2)])
def test_photographs_are_turned_to_the_orientation_in_their_metadata(rng, number, kind, size):
    """Numbers 0 and 9 do not exist. Blocks of 8 pixels survive JPEG and its reductions."""
    stored = rng.integers(0, 256, (3, 5, 1)).repeat(8, 0).repeat(8, 1).repeat(3, 2).astype(np.uint8)
    metadata = image.Exif()
    metadata[0x0112] = number
    file = io.BytesIO()
    options = {"lossless": True} if kind == "WEBP" else {"quality": 98} if kind == "JPEG" else {}
    image.fromarray(stored).save(file, kind, exif=metadata, **options)
    upright = {  # table 6 of EXIF 2.3: what row 0 and column 0 of the file show
        2: stored[:, ::-1],
        3: stored[::-1, ::-1],
        4: stored[::-1],
        5: stored.swapaxes(0, 1),
        6: stored[::-1].swapaxes(0, 1),
        7: stored[::-1, ::-1].swapaxes(0, 1),
        8: stored[:, ::-1].swapaxes(0, 1),
    }.get(number, stored)
    for turned, expected in ((True, upright), (False, stored)):
        found = Decoder("test", size, exif_rotation=turned)(file.getvalue(), "a")
        reference = Decoder("test", size)(encoded(np.ascontiguousarray(expected)), "a.png")
        assert found.shape == reference.shape
        # JPEG's colours are rounded; it is reduced with another filter than Pillow's.
        limit = (8 if size is None else 60) if kind == "JPEG" else 0
        assert abs(found.astype(int) - reference).max() <= limit


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_damaged_metadata_turn_nothing(pixels):
    file = io.BytesIO()
    image.fromarray(pixels).save(file, "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    plain = Decoder("test", exif_rotation=False)(file.getvalue(), "a.jpg")
    np.testing.assert_array_equal(Decoder("test")(file.getvalue(), "a.jpg"), plain)


@each("suffix", [".png", ".jpg", ".eps"])
def test_no_program_is_started_for_an_image(tmp_path, monkeypatch, suffix):
    """Pillow starts Ghostscript (gs) for EPS, whatever a file is called."""
    program, started = tmp_path / "gs", tmp_path / "started"
    program.write_text(f"#!/bin/sh\ntouch {started}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    eps = importlib.import_module("PIL.EpsImagePlugin")
    for name in ("gs_binary", "gs_windows_binary"):
        monkeypatch.setattr(eps, name, None)  # it looks for the program once
    data = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n%%EOF\n"
    with pytest.raises(ValueError, match="expected a PNG, JPEG or WebP image"):
        Decoder("test")(data, f"a{suffix}")
    assert not started.exists()
    with suppress(OSError), image.open(io.BytesIO(data)) as opened:
        opened.load()
    assert started.exists()  # by Pillow alone


def test_damaged_and_other_files_are_told_by_name_in_one_sentence(rng):
    pixels = rng.integers(0, 256, (40, 40, 3)).astype(np.uint8)
    other = [b"", b"not an image", encoded(pixels, "BMP")]
    for whole in (encoded(pixels, "PNG"), encoded(pixels, "JPEG")):
        other += [whole[:length] for length in (1, 20, 100, len(whole) // 2, len(whole) * 3 // 4)]
    for data in other:
        with pytest.raises(ValueError, match=r"^test: .*x/a\.jpg.*; remove or replace it$"):
            Decoder("test")(data, "x/a.jpg")
    for options, reason in (({"size": 0}, "at least 1"), ({"channels": 2}, "must be 1, 3 or 4")):
        with pytest.raises(ValueError, match=reason):
            Decoder("test", **options)
