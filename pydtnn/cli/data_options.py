"""Options of the model and the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydtnn.cli.options import MODEL, option
from pydtnn.data import CutMix, Mixing, Mixup


@dataclass(frozen=True)
class DataOptions:
    """Options of the configuration that choose model and data, and how samples are changed."""

    model: str = option(MODEL, "resnet44", "name of a model, or path/to/file.py:function")
    model_options: dict[str, Any] = option(
        MODEL, {}, 'options of the model, such as {"shortcut": "A"}'
    )
    dataset: str = option(MODEL, "synthetic", "name of a data set, or path/to/file.py:function")
    dataset_options: dict[str, Any] = option(
        MODEL, {}, 'options of the data set, such as {"samples": 20000}'
    )
    data_dir: str | None = option(
        MODEL,
        str,
        "folder of the data; by default $PYDTNN_DATA, otherwise the user's cache",
        metavar="FOLDER",
    )
    stage: str | None = option(
        MODEL,
        str,
        "copy the shards to this folder of each host first, such as /local/me, and read them there",
        metavar="FOLDER",
    )
    download: bool = option(MODEL, False, "download the data if they are missing")
    image_size: int | None = option(
        MODEL,
        int,
        "height and width of samples, to which images from files are resized and cropped",
        at_least=1,
    )
    validation_split: float = option(
        MODEL,
        0.0,
        "validate on this fraction of the training set instead of the test set",
        at_least=0,
        below=1,
    )
    augment: str = option(
        MODEL,
        "",
        "augmentation of training images: crop:4,flip,jitter or resized_crop:0.3,randaugment:2:9",
        metavar="LIST",
    )
    mixup: float | None = option(
        MODEL,
        float,
        "average pairs of training samples and their labels, with weights from Beta(X, X): 0.2",
        above=0,
    )
    cutmix: float | None = option(
        MODEL,
        float,
        "replace a box of each training image by that of another one, and mix their labels by "
        "area, which is from Beta(X, X): 1.0; with --mixup, one of the two for each sample",
        above=0,
    )

    def mixings(self) -> tuple[Mixing, ...]:
        """Return the mixtures of training samples that the options choose."""
        chosen = ((Mixup, self.mixup), (CutMix, self.cutmix))
        return tuple(mixing(alpha) for mixing, alpha in chosen if alpha is not None)
