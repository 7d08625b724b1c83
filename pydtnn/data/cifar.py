"""CIFAR-10 and CIFAR-100: 50,000 and 10,000 colour photographs of 32 x 32 pixels.

Krizhevsky, "Learning multiple layers of features from tiny images" (2009). Both the binary and the
Python version are read. Files contain the colour planes of an image one after the other; they are
interleaved once when loading, because that takes several times longer than reading an image.
"""

from __future__ import annotations

import io
import math
import os
import pickletools
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from pydtnn.data.array import ArrayDataset
from pydtnn.data.dataset import Dataset
from pydtnn.data.download import Layout, Source, fetch, locate
from pydtnn.utils.files import read_file
from pydtnn.utils.names import unknown

# Safe reading of pickles: those of CIFAR, and those in the files of PyTorch.
#
# A pickle is a program for a stack machine with a memo: it may call any function, nest objects so
# deeply that hashing them overflows the C stack, and declare sizes that exceed the memory. The
# interpreter here implements only the instructions of plain data. The names that NumPy writes for
# an array of bytes are replaced by classes that check their arguments; any other name raises an
# error. A pickle can therefore only create arrays of bytes, strings, numbers, lists and
# dictionaries. For tensors, `pydtnn.interchange.torch_files` passes other replacements.


class _Array:
    """Replacement of ``numpy.ndarray`` and of the function that creates an empty array."""

    def __init__(self, *empty: object) -> None:
        self.values: NDArray[np.uint8] = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, data = state
        if (
            not isinstance(dtype, _ByteType)
            or not isinstance(data, bytes)
            or any(type(length) is not int or length < 0 for length in shape)
            or len(data) != math.prod(shape)
        ):
            raise ValueError("an array with the wrong number of bytes for its shape")
        self.values = np.frombuffer(data, np.uint8).reshape(shape, order="F" if fortran else "C")


class _ByteType:
    """Replacement of ``numpy.dtype``, for unsigned bytes only."""

    def __init__(self, code: str | bytes, *flags: object) -> None:
        if not isinstance(code, str | bytes) or code not in ("u1", b"u1"):
            given = repr(code) if isinstance(code, str | bytes) else "another kind"
            raise ValueError(f"an array of {given}")

    def __setstate__(self, state: object) -> None:
        """Ignore byte order and alignment, which do not apply to bytes."""


Names = Mapping[tuple[str, str], Any]
"""Replacements of the objects that a pickle may refer to, by module and name.

Classes and functions may be called by the pickle, with any arguments; other values may not.
"""

STANDINS: Names = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _ByteType,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
}

CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}

VALUES = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
"""Instructions that push their argument."""

STRINGS = {"STRING", "BINSTRING", "SHORT_BINSTRING"}
"""Strings of Python 2: bytes, which `pickletools` decodes as Latin-1."""

TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class Refused(Exception):
    """The pickle contains a name that is not plain data."""


DAMAGED = (ValueError, TypeError, LookupError, OverflowError)
"""Errors of the instructions of a pickle that is damaged."""


def run_pickle(
    stream: BinaryIO, names: Names, persistent: Callable[[Any], Any] | None = None
) -> Any:
    """Return the object of the pickle at the position of a stream, and move behind its end.

    Parameters
    ----------
    stream : file
        Of bytes in memory, so that a size that the pickle declares is not allocated.
    names : mapping
    persistent : callable, optional
        Returns the object outside the pickle that an identifier belongs to.

    Raises
    ------
    Refused
        If the pickle contains another name, or an object outside it.
    ValueError, TypeError, LookupError, OverflowError
        If it is damaged; `DAMAGED` contains them.
    """
    return _Machine(names, persistent).run(stream)


class _Machine:
    """Interpreter of a pickle, with one method call per instruction."""

    def __init__(self, names: Names, persistent: Callable[[Any], Any] | None) -> None:
        self.names, self.persistent = names, persistent
        self.kinds = tuple(kind for kind in names.values() if isinstance(kind, type))
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, stream: BinaryIO) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in the strings of a damaged pickle
            for opcode, argument, _ in pickletools.genops(stream):
                if opcode.name == "STOP":
                    break
                self.do(opcode.name, argument)
        (result,) = self.stack
        return result

    def do(self, name: str, argument: Any) -> None:
        push = self.stack.append
        if name in VALUES:
            push(argument)
        elif name in STRINGS:
            push(argument.encode("latin1"))
        elif name in CONSTANTS:
            push(CONSTANTS[name])
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self.memo[len(self.memo) if argument is None else argument] = self.stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            push(self.memo[argument])
        elif name == "MARK":
            self.marks.append(len(self.stack))
        elif name in ("EMPTY_LIST", "EMPTY_DICT"):
            push([] if name == "EMPTY_LIST" else {})
        elif name == "LIST":
            push(self.since_mark())
        elif name == "DICT":
            items = self.since_mark()
            push(self.filled({}, items))
        elif name in ("EMPTY_TUPLE", "TUPLE"):
            push(tuple(self.since_mark()) if name == "TUPLE" else ())
        elif name in TUPLES:
            push(tuple(self.popped(TUPLES[name])))
        elif name in ("APPEND", "APPENDS"):
            items = self.popped(1) if name == "APPEND" else self.since_mark()
            self.top(list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = self.popped(2) if name == "SETITEM" else self.since_mark()
            self.filled(self.top(dict), items)
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            module, found = argument.split(" ", 1) if argument else self.popped(2)
            if not isinstance(module, str) or not isinstance(found, str):
                raise ValueError("a name that is not a string")
            if (module, found) not in self.names:
                raise Refused(f"{module}.{found}")
            push(self.names[module, found])
        elif name == "REDUCE":
            kind, arguments = self.popped(2)
            if not callable(kind) or not isinstance(arguments, tuple):
                raise ValueError("a call of an object that is not a function")
            push(kind(*arguments))
        elif name == "BUILD":
            (state,) = self.popped(1)
            self.top(*self.kinds).__setstate__(state)
        elif name == "BINPERSID" and self.persistent is not None:
            push(self.persistent(*self.popped(1)))
        elif name not in ("PROTO", "FRAME"):
            what = "outside the file" if "PERSID" in name else f"made by {name}"
            raise Refused(f"an object {what}")

    def popped(self, count: int) -> list[Any]:
        """Pop `count` values from the stack, down to the last mark at most."""
        if len(self.stack) - (self.marks[-1] if self.marks else 0) < count:
            raise ValueError("the stack is empty")
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def since_mark(self) -> list[Any]:
        """Pop all values after the last mark."""
        items = self.stack[self.marks[-1] :]
        del self.stack[self.marks.pop() :]
        return items

    def top(self, *kinds: type) -> Any:
        """Return the last value without removing it."""
        if not isinstance(self.stack[-1], kinds):
            raise ValueError("an update of an object that is not a list or dictionary")
        return self.stack[-1]

    def filled(self, into: dict[Any, Any], items: list[Any]) -> dict[Any, Any]:
        """Add alternating keys and values; keys are strings or numbers, so hashing is safe."""
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | bytes | int):
                raise ValueError(f"a key that is not a string but of type {type(key).__name__}")
            into[key.decode("latin1") if isinstance(key, bytes) else key] = value
        return into


def read_pickle(path: Path) -> dict[str, Any]:
    """Read a pickled dictionary of arrays of bytes, strings, numbers and lists.

    Parameters
    ----------
    path : Path
        Written by Python 2 or 3. Keys are returned as str, other strings of Python 2 as bytes.

    Raises
    ------
    ValueError
        If the pickle contains anything else, such as a function call, or is damaged.
    """
    program = read_file("cifar", path)
    try:
        content = run_pickle(io.BytesIO(program), STANDINS)
    except Refused as error:
        raise ValueError(
            f"{path}: expected only arrays, strings and numbers, got a pickle that refers to "
            f"{one_line(error)}; nothing was executed: delete the file and download it from a "
            "trusted source"
        ) from None
    except DAMAGED as error:
        raise ValueError(
            f"{path}: expected a pickle, but it cannot be read ({one_line(error)}); the file is "
            "truncated or damaged: delete it and download it again"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a pickled dictionary, got {type(content).__name__}")
    return {
        name: value.values if isinstance(value, _Array) else value
        for name, value in content.items()
    }


def one_line(error: Exception) -> str:
    """Return the message of an error in one short line; it may contain text of the pickle."""
    text = " ".join(str(error).split())
    return text if len(text) < 200 else f"{text[:200]}..."


Array = NDArray[Any]

_TEN = "airplane automobile bird cat deer dog frog horse ship truck"

_FINE = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus
    butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach
    couch crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster
    house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
    motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear
    pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road
    rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel
    streetcar sunflower sweet_pepper table tank telephone television tiger tractor train
    trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""

_COARSE = """
    aquatic_mammals fish flowers food_containers fruit_and_vegetables
    household_electrical_devices household_furniture insects large_carnivores
    large_man-made_outdoor_things large_natural_outdoor_scenes
    large_omnivores_and_herbivores medium_mammals non-insect_invertebrates people reptiles
    small_mammals trees vehicles_1 vehicles_2
"""

NAMES_10 = tuple(_TEN.split())
"""By label."""

NAMES_100 = {"fine": tuple(_FINE.split()), "coarse": tuple(_COARSE.split())}
"""By kind of labels; both in alphabetical order, which is that of the labels."""


SIDE, CHANNELS = 32, 3
PIXELS = CHANNELS * SIDE * SIDE
CHUNK_IMAGES = 100  # images that fit in the cache while their planes are interleaved
BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))

LAYOUTS_10 = (
    Layout(("cifar-10-batches-bin", "."), (*(f"{b}.bin" for b in BATCHES), "test_batch.bin")),
    Layout(("cifar-10-batches-py", "."), (*BATCHES, "test_batch")),
)
LAYOUTS_100 = (
    Layout(("cifar-100-binary", "."), ("train.bin", "test.bin")),
    Layout(("cifar-100-python", "."), ("train", "test")),
)
SITE = "https://www.cs.toronto.edu/~kriz"
SOURCE_10 = Source(
    f"{SITE}/cifar-10-binary.tar.gz",
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    "cifar-10-batches-bin",
    (*LAYOUTS_10[0].files, "batches.meta.txt"),
)
SOURCE_100 = Source(
    f"{SITE}/cifar-100-binary.tar.gz",
    "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    "cifar-100-binary",
    (*LAYOUTS_100[0].files, "fine_label_names.txt", "coarse_label_names.txt"),
)
COUNTS_10, COUNTS_100 = (*[10_000] * 5, 10_000), (50_000, 10_000)
"""Images in each file."""

LABELS_100 = {"coarse": 20, "fine": 100}
"""The labels of a CIFAR-100 image, in the order of the binary file, and their classes."""


def load_cifar10(
    *,
    data_dir: str | os.PathLike[str] | None = None,
    download: bool = False,
    any_size: bool = False,
) -> tuple[Dataset, Dataset]:
    """Read CIFAR-10 from `data_dir` or ``cifar-10-batches-bin`` or ``cifar-10-batches-py`` in it.

    Parameters
    ----------
    data_dir, download
        See `pydtnn.data.load_dataset`.
    any_size : bool, default False
        Whether files may contain fewer or more images than the 10,000 of the original ones.

    Raises
    ------
    FileNotFoundError
        If a file is missing.
    ValueError
        If a file is truncated, does not contain CIFAR images, has another number of them or invalid
        labels, or is a pickle with anything but data.
    """
    get = partial(fetch, "cifar10", (SOURCE_10,)) if download else None
    layout, paths = locate("cifar10", LAYOUTS_10, data_dir, get)
    if layout == 0:
        files = [_read_binary("cifar10", path, 1, 0, 10) for path in paths]
    else:
        files = [_read_python("cifar10", path, "labels", 10) for path in paths]
    if not any_size:
        _check_counts("cifar10", paths, files, COUNTS_10)
    return _split("cifar10", files, NAMES_10)


def load_cifar100(
    *,
    data_dir: str | os.PathLike[str] | None = None,
    download: bool = False,
    labels: str = "fine",
    any_size: bool = False,
) -> tuple[Dataset, Dataset]:
    """Read CIFAR-100 from `data_dir` or ``cifar-100-binary`` or ``cifar-100-python`` in it.

    Parameters
    ----------
    labels : "fine" or "coarse", default "fine"
        The 100 classes, or the 20 groups of them.
    any_size : bool, default False
        Whether files may contain fewer or more images than the 50,000 and 10,000 of the original
        ones.

    Raises
    ------
    FileNotFoundError, ValueError
        As `load_cifar10`.
    """
    if labels not in LABELS_100:
        raise ValueError(f"cifar100: {unknown('kind of labels', labels, LABELS_100)}")
    get = partial(fetch, "cifar100", (SOURCE_100,)) if download else None
    layout, paths = locate("cifar100", LAYOUTS_100, data_dir, get)
    classes, column = LABELS_100[labels], list(LABELS_100).index(labels)
    if layout == 0:
        files = [_read_binary("cifar100", path, 2, column, classes) for path in paths]
    else:
        files = [_read_python("cifar100", path, f"{labels}_labels", classes) for path in paths]
    if not any_size:
        _check_counts("cifar100", paths, files, COUNTS_100)
    return _split("cifar100", files, NAMES_100[labels])


def _check_counts(
    name: str, paths: list[Path], files: list[tuple[Array, Array]], counts: Sequence[int]
) -> None:
    """Raise ValueError if files are truncated between two images, which no other check detects."""
    for path, (_, labels), count in zip(paths, files, counts, strict=True):
        if len(labels) != count:
            raise ValueError(
                f"{name}: {path} must contain {count} images, got {len(labels)}; download the file "
                "again, or set any_size=True (--dataset-options '{\"any_size\": true}') if that "
                "number is intended"
            )


def _split(
    name: str, files: list[tuple[Array, Array]], names: tuple[str, ...]
) -> tuple[Dataset, Dataset]:
    """Create the training set from all files but the last, and the test set from the last."""
    train = _dataset(name, files[:-1], names)
    return train, _dataset(name, files[-1:], names, train)


def _dataset(
    name: str, files: list[tuple[Array, Array]], names: tuple[str, ...], like: Dataset | None = None
) -> Dataset:
    labels = np.concatenate([labels for _, labels in files])
    x = np.empty((len(labels), SIDE, SIDE, CHANNELS), np.uint8)
    first = 0
    for pixels, _ in files:
        for start in range(0, len(pixels), CHUNK_IMAGES):
            planes = pixels[start : start + CHUNK_IMAGES].reshape(-1, CHANNELS, SIDE, SIDE)
            # Three times faster than one transposed copy with an inner loop of length C.
            for c in range(CHANNELS):
                x[first : first + len(planes), ..., c] = planes[:, c]
            first += len(planes)
    return ArrayDataset(x, labels, class_names=names, like=like, name=name)


def _read_binary(
    name: str, path: Path, label_bytes: int, column: int, classes: int
) -> tuple[Array, Array]:
    """Read a file of records: labels, then pixels.

    It is not mapped into memory: truncation of a mapped file would terminate the process.
    """
    record, data = label_bytes + PIXELS, np.frombuffer(read_file(name, path), np.uint8)
    if len(data) == 0 or len(data) % record:
        raise ValueError(
            f"{name}: {path} must contain records of {record} bytes, got {len(data)} bytes; the "
            "file is truncated or has another format: delete it and download it again"
        )
    records = data.reshape(-1, record)
    return records[:, label_bytes:], _checked(name, path, records[:, column], classes)


def _read_python(name: str, path: Path, key: str, classes: int) -> tuple[Array, Array]:
    """Read a pickled dictionary of pixels and labels."""
    content = read_pickle(path)
    pixels, labels = content.get("data"), content.get(key)
    if not isinstance(pixels, np.ndarray) or pixels.shape[1:] != (PIXELS,) or not len(pixels):
        raise ValueError(
            f"{name}: {path} must contain 'data' of {PIXELS} bytes per image; download it again"
        )
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise ValueError(f"{name}: {path} must contain the numbers {key!r}; download it again")
    if len(labels) != len(pixels):
        raise ValueError(
            f"{name}: {path} must contain one label per image, got {len(pixels)} images and "
            f"{len(labels)} labels; download it again"
        )
    return pixels, _checked(name, path, labels, classes)


def _checked(
    name: str, path: Path, labels: Sequence[int] | Array, classes: int
) -> NDArray[np.int64]:
    wrong = next((label for label in labels if not 0 <= label < classes), None)
    if wrong is not None:
        raise ValueError(
            f"{name}: labels in {path} must be in 0..{classes - 1}, got {wrong}; the file is "
            "damaged or belongs to another data set: download it again"
        )
    return np.array(labels, np.int64)
