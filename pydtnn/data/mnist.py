"""MNIST: 60,000 and 10,000 handwritten digits, 28 x 28 pixels, in four idx files."""

from __future__ import annotations

import os
from functools import partial

from pydtnn.data.array import ArrayDataset
from pydtnn.data.dataset import Dataset
from pydtnn.data.download import Source, fetch
from pydtnn.data.idx import read_idx
from pydtnn.data.locate import Layout, locate

SIDE = 28
NAMES = tuple("0123456789")
FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
LAYOUTS = (Layout(("mnist", "MNIST/raw", "MNIST", "."), FILES),)
MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist"
CHECKSUMS = (
    "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
)
SOURCES = tuple(
    Source(f"{MIRROR}/{f}.gz", c, "mnist") for f, c in zip(FILES, CHECKSUMS, strict=True)
)


def load_mnist(
    *, data_dir: str | os.PathLike[str] | None = None, download: bool = False
) -> tuple[Dataset, Dataset]:
    """Read MNIST, gzipped or not, from `data_dir` or its folder ``mnist`` or ``MNIST/raw``.

    Raises
    ------
    FileNotFoundError
        If a file is missing.
    ValueError
        If a file is truncated, has another format, or labels do not match the images.
    """
    get = partial(fetch, "mnist", SOURCES) if download else None
    _, paths = locate("mnist", LAYOUTS, data_dir, get)
    parts: list[Dataset] = []
    for images_path, labels_path in (paths[:2], paths[2:]):
        images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
        if images.shape[1:] != (SIDE, SIDE) or not len(images):
            raise ValueError(
                f"mnist: {images_path} must contain images of {SIDE} x {SIDE} pixels, got "
                f"{' x '.join(map(str, images.shape))} in its header; download the file again"
            )
        if len(images) != len(labels):
            raise ValueError(
                f"mnist: expected one label per image, got {len(images)} images in {images_path} "
                f"and {len(labels)} labels in {labels_path}; download both files again"
            )
        if labels.max() > 9:
            raise ValueError(
                f"mnist: labels in {labels_path} must be in 0..9, got {labels.max()}; download the "
                "file again"
            )
        parts.append(
            ArrayDataset(
                images[..., None],
                labels,
                class_names=NAMES,
                name="mnist",
                like=parts[0] if parts else None,
            )
        )
    return parts[0], parts[1]
