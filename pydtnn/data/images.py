"""Data sets of PNG, JPEG and WebP images that are decoded when they are read."""

from __future__ import annotations

import io
import math
import struct
import threading
import zlib
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pydtnn.data.dataset import Dataset
from pydtnn.data.order import as_indices
from pydtnn.data.pixels import resize
from pydtnn.data.statistics import Statistics
from pydtnn.utils.imports import import_optional
from pydtnn.utils.units import parse_quantity
from pydtnn.utils.validate import check_bool, check_float, check_int

# Decoding of images with Pillow, to pixels of one size.
#
# JPEGs are decoded with simplejpeg if it is installed: both use libjpeg-turbo with the same
# options, so the pixels are equal, but Pillow takes 2 to 10 times as long.

MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Pillow's modes of images by channels."""

FORMATS = ("PNG", "JPEG", "WEBP")
"""Pillow's names of the formats that are read, wherever images are opened: for some others, Pillow
starts programs, such as Ghostscript."""

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
KINDS = "PNG, JPEG or WebP"

MARKER = b"\xff\xd8\xff"
"""The first bytes of a JPEG."""

DAMAGED = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error)
"""Errors of Pillow for damaged data."""

MAX_MEMORY = 16 << 20
"""Bytes that a thread keeps for images that are resized."""

MAX_NAMED = 50
"""Bad files that a message names."""

TURNED, STORED = "photographs upright", "photographs as stored"
"""Encodings of a data set with and without `Decoder.exif_rotation`."""

ORIENTATION, UPRIGHT = 0x0112, 1
TRANSPOSES = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""The entry of EXIF metadata with the orientation of a photograph, and which `Transpose` of Pillow
makes it upright; above 4, sides are exchanged."""


@dataclass(frozen=True)
class Decoder:
    """Decode images; the pixels depend on the bytes, the attributes and the libraries only.

    With a size, the largest part in the middle of an image that has its proportions is resized to
    it: bilinear, with a filter as wide as the reduction, along rows first (`pixels.resize`). JPEGs
    of at least four times the size are decoded at a half, a quarter or an eighth of theirs first,
    which is still twice the result.
    Of 16 bits per channel, the upper 8 are used.

    Attributes
    ----------
    who : str
        First word of error messages.
    size : int, (int, int) or None
        Height and width in pixels, one number if they are equal; None keeps those of each image.
    channels : int, default 3
        1 for grey, 3 for colour, 4 for colour and transparency; images are converted.
    exif_rotation : bool, default True
        Whether photographs are turned to the orientation in their metadata.

    Raises
    ------
    ValueError
        If a number is not possible.
    ImportError
        If Pillow is not installed.
    """

    who: str
    size: int | tuple[int, int] | None = None
    channels: int = 3
    exif_rotation: bool = True

    def __post_init__(self) -> None:
        for side in self._sides or ():
            check_int(self.who, "image_size", side, at_least=1)
        if self.channels not in MODES:
            raise ValueError(f"{self.who}: channels must be 1, 3 or 4, got {self.channels}")
        check_bool(self.who, "exif_rotation", self.exif_rotation)
        self._pillow()

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """Shape of the pixels, if there is a size."""
        return None if self._sides is None else (*self._sides, self.channels)

    @property
    def _sides(self) -> tuple[int, int] | None:
        return self.size if self.size is None or isinstance(self.size, tuple) else (self.size,) * 2

    def __call__(self, data: bytes, where: str) -> NDArray[np.uint8]:
        """Return the pixels of an image, a new array ``(H, W, channels)``.

        Parameters
        ----------
        data : bytes
            Content of the file.
        where : str
            Name of the image in error messages.

        Raises
        ------
        ValueError
            If the data have another format, or are damaged.
        """
        pillow = self._pillow()
        if (fast := self._jpeg(data)) is not None:
            return fast
        try:
            with pillow.open(io.BytesIO(data), formats=FORMATS) as image:
                return self._read(image)
        except pillow.UnidentifiedImageError as error:
            raise ValueError(
                f"{self.who}: expected a {KINDS} image in {where}, got other or damaged data; "
                "remove or replace it"
            ) from error
        except (*DAMAGED, pillow.DecompressionBombError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"{self.who}: the image {where} is damaged ({reason}); remove or replace it"
            ) from error

    def _pillow(self) -> Any:
        return import_optional("PIL.Image", "pillow", f"{self.who}: reading images")

    def _jpeg(self, data: bytes) -> NDArray[np.uint8] | None:
        """Return the pixels of an undamaged JPEG; None if Pillow has to decode the data.

        Pillow converts colours to grey, turns photographs, and reports damage.
        """
        simplejpeg, pillow = _simplejpeg(), self._pillow()
        if simplejpeg is None or not data.startswith(MARKER):
            return None
        try:
            if self.exif_rotation and (b"Exif\0\0" in data or b":Orientation" in data):
                with pillow.open(io.BytesIO(data), formats=FORMATS) as image:
                    if self._orientation(image) != UPRIGHT:
                        return None
            height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
            most = pillow.MAX_IMAGE_PIXELS
            if colours not in ("Gray", "YCbCr") or (most and height * width > most):
                return None
            if self.channels == 4 or (self.channels == 1 and colours != "Gray"):
                return None
            own = _decoded((height, width), self._sides)
            if max(height, width) < 8:  # several fractions would be of the same size
                return None
            resized = self._sides not in (None, own)
            memory = _memory(own[0] * own[1] * self.channels) if resized else None
            kind = "GRAY" if self.channels == 1 else "RGB"
            pixels = simplejpeg.decode_jpeg(
                data, kind, min_height=own[0], min_width=own[1], buffer=memory
            )
        except (*DAMAGED, pillow.DecompressionBombError):
            return None
        return self._fit(pixels) if pixels.shape[:2] == own else None

    def _orientation(self, image: Any) -> int:
        """Return the orientation that is to be applied to an open image."""
        try:
            number = image.getexif().get(ORIENTATION) if self.exif_rotation else UPRIGHT
            return number if number in TRANSPOSES else UPRIGHT
        except Exception:  # damaged metadata, for which Pillow has errors of many types
            return UPRIGHT

    def _read(self, image: Any) -> NDArray[np.uint8]:
        """Return the pixels of an open image."""
        orientation = self._orientation(image)
        if self._sides is not None:
            height, width = self._sides[::-1] if orientation > 4 else self._sides
            image.draft(None, (2 * width, 2 * height))
        if orientation != UPRIGHT:
            image = image.transpose(TRANSPOSES[orientation])
        if image.mode.startswith("I"):  # 16 bits
            image = self._pillow().fromarray((np.asarray(image) >> 8).astype(np.uint8))
        if image.mode == "P" and "transparency" in image.info:
            image = image.convert("RGBA")  # Pillow warns of any other conversion
        mode = MODES[self.channels]
        pixels = np.array(image if image.mode == mode else image.convert(mode))
        return self._fit(pixels.reshape(*pixels.shape[:2], self.channels))

    def _fit(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Resize the middle of an image ``(H, W, channels)``."""
        if self._sides is None or pixels.shape[:2] == self._sides:
            return pixels
        (height, width), (tall, wide) = self._sides, pixels.shape[:2]
        across, down = (
            min(wide, max(tall * width // height, 1)),
            min(tall, max(wide * height // width, 1)),
        )
        left, top = (wide - across) // 2, (tall - down) // 2
        box = (left, top, left + across, top + down)
        if self.channels == 4:  # colours count as much as they can be seen
            image, pillow = self._pillow().fromarray(pixels), self._pillow()
            return np.array(image.resize((width, height), pillow.Resampling.BILINEAR, box=box))
        out = np.empty((height, width, self.channels), np.uint8)
        resize(pixels, box, out)
        return out


def name_bad(problems: Sequence[str]) -> str:
    """Return what is wrong with files as a part of a sentence, of the first ones if there are many.

    >>> name_bad(["a.png is damaged", "b.bmp is no image"])
    '2 files cannot be used: a.png is damaged; b.bmp is no image'
    >>> name_bad([f"{i}.png is damaged" for i in range(MAX_NAMED)])[-26:]
    'damaged; 49.png is damaged'
    """
    if len(problems) == 1:
        return problems[0]
    more = [f"and {len(problems) - MAX_NAMED} more"] * (len(problems) > MAX_NAMED)
    return f"{len(problems)} files cannot be used: " + "; ".join([*problems[:MAX_NAMED], *more])


def _decoded(own: tuple[int, int], sides: tuple[int, int] | None) -> tuple[int, int]:
    """Return the size at which a JPEG is decoded for a result, as Pillow's `draft` chooses it."""
    times = min(extent // (2 * side) for extent, side in zip(own, sides or own, strict=True))
    step = next((step for step in (8, 4, 2) if times >= step), 1)
    return -(-own[0] // step), -(-own[1] // step)


_own = threading.local()


def _memory(nbytes: int) -> NDArray[np.uint8]:
    """Return memory of this thread, which is kept: new pages cost a quarter of the decoding."""
    memory: NDArray[np.uint8] = getattr(_own, "memory", np.empty(0, np.uint8))
    if len(memory) < nbytes:
        memory = np.empty(nbytes, np.uint8)
        if nbytes <= MAX_MEMORY:
            _own.memory = memory
    return memory


@cache
def _simplejpeg() -> Any:
    """Return the module, or None if it is not installed."""
    try:
        return import_module("simplejpeg")
    except ImportError:
        return None


Array = NDArray[Any]

KEEP = "0 B"
"""Decoded images that stay in memory, by default none."""

MAX_SERIAL_PIXELS = 48 * 48
"""Pixels of images that are decoded by one thread at a time: decoding them takes less time than
threads lose when they hand Python's interpreter lock to one another for every image."""


class EncodedImages(Dataset):
    """Labelled images of one size; a subclass finds their encoded bytes.

    Only the images of a batch, and those that are kept, are in memory. They are decoded by the
    threads of the loader.

    Parameters
    ----------
    decode : Decoder
    labels : array of int, shape ``(n,)``
    class_names : sequence of str
    like : EncodedImages, optional
        The training set, if this one is a test set.
    statistics : Statistics, optional
        Of a training set, if they are known. Otherwise they are measured before training.
    check : bool
        Whether all images are decoded once before training, also if nothing is to be measured.
    keep : str
        Size of the decoded images that stay in memory, such as "2 GiB": of each process, and of
        this data set. Those that are read first are kept, so that later epochs read the same.

    Raises
    ------
    ValueError
        If the decoder has no size and the first image is damaged.
    """

    def __init__(
        self,
        decode: Decoder,
        labels: Array,
        class_names: Sequence[str],
        *,
        like: EncodedImages | None,
        statistics: Statistics | None,
        check: bool,
        keep: str = KEEP,
    ) -> None:
        self.name, self.decode, self.like = decode.who, decode, like
        self.encoding = TURNED if decode.exif_rotation else STORED
        self.labels = np.asarray(labels, np.int64)
        self.class_names, self.classes = tuple(class_names), len(class_names)
        if like is not None:
            self.input_shape = like.input_shape
        elif decode.shape is not None:
            self.input_shape = decode.shape
        else:
            self.input_shape = decode(self.encoded(0), self.place(0)).shape
        nbytes = parse_quantity(f"{self.name}: keep", keep, "B", positive=False)
        self._most, self._kept = nbytes // math.prod(self.input_shape), dict[int, Array]()
        if statistics is not None and like is None:
            self.statistics = statistics
        height, width = self.input_shape[:2]
        self._turn = threading.Lock() if height * width <= MAX_SERIAL_PIXELS else nullcontext()
        known = like is not None or statistics is not None
        self.examined = known and decode.size is not None and not check

    @abstractmethod
    def encoded(self, index: int) -> bytes:
        """Return the content of an image's file."""

    @abstractmethod
    def place(self, index: int) -> str:
        """Name an image in error messages."""

    def position(self, indices: Array) -> Array:
        """Return numbers in whose order samples are read fastest."""
        return indices

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, indices: Array) -> tuple[Array, Array]:
        indices = as_indices(self.name, indices, len(self))
        x = np.empty((len(indices), *self.input_shape), np.uint8)
        with self._turn:
            for row in np.argsort(self.position(indices), kind="stable"):
                x[row] = self._image(int(indices[row]))
        return x, self.labels[indices]

    def read_targets(self, indices: Array) -> Array:
        return self.labels[as_indices(self.name, indices, len(self))]

    def _image(self, index: int) -> Array:
        if (known := self._kept.get(index)) is not None:
            return known
        where = self.place(index)
        pixels = self.decode(self.encoded(index), where)
        if pixels.shape != self.input_shape:
            height, width = pixels.shape[:2]
            raise ValueError(
                f"{self.name}: expected images of {self.input_shape[0]} x {self.input_shape[1]} "
                f"pixels, as the first one has, got {height} x {width} in {where}; set "
                "image_size=N, to which all are resized and cropped"
            )
        if len(self._kept) < self._most:
            self._kept[index] = pixels
        return pixels


def user_statistics(
    who: str, mean: Sequence[float] | None, std: Sequence[float] | None, channels: int
) -> Statistics | None:
    """Return statistics that the user gives, for pixels in [0, 1], or None.

    Raises
    ------
    TypeError, ValueError
        If only one of them is given, or they are not one number per channel.
    """
    if mean is None and std is None:
        return None
    arrays = []
    for name, values, limits in (("mean", mean, {"at_least": 0}), ("std", std, {"above": 0})):
        if not isinstance(values, list | tuple) or len(values) != channels:
            raise ValueError(
                f"{who}: mean and std must both be lists of {channels} numbers, one per channel, "
                f"for pixels from 0 to 1, got {name} {values}"
            )
        arrays.append(np.array([check_float(who, name, v, at_most=1, **limits) for v in values]))
    return Statistics(*arrays)
