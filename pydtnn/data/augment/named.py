"""Augmentations by name."""

from __future__ import annotations

import re

from pydtnn.data.augment.augmentation import Augmentation
from pydtnn.utils.lazy import Named
from pydtnn.utils.registry import Factory, Registry

AUGMENTATIONS = Named(
    "pydtnn.data.augment",
    {
        "crop": "RandomCrop",
        "resized_crop": "RandomResizedCrop",
        "flip": "HorizontalFlip",
        "alternating_flip": "AlternatingFlip",
        "jitter": "ColorJitter",
        "randaugment": "RandAugment",
        "cutout": "Cutout",
        "erasing": "RandomErasing",
    },
)
"""Augmentations by their name on the command line, in the usual order."""

AUGMENTATION: Registry[Augmentation] = Registry(
    "augmentation",
    AUGMENTATIONS,
    Augmentation,
    "an Augmentation, or a class or function that returns one",
)
"""Finds augmentations by name."""


def create_augmentations(text: str) -> tuple[Augmentation, ...]:
    """Build augmentations from ``"crop:4,flip,randaugment:2:9"``; ``""`` and ``"none"`` build none.

    Numbers after colons are the parameters of the augmentation, in their order; those that are
    omitted have their defaults.

    >>> create_augmentations("crop:4,flip")
    (RandomCrop(padding=4), HorizontalFlip())
    """
    built = []
    for item in text.replace(" ", "").split(","):
        name, *numbers = item.split(":")
        if name in ("", "none"):
            continue
        found = AUGMENTATION.find(name)
        built.append(found.make({}, *_read(item, numbers, found)))
    return tuple(built)


def _read(item: str, texts: list[str], found: Factory[Augmentation]) -> list[int | float]:
    """Read the numbers of an item; those of whole parameters must be whole."""
    whole, real = r"[0-9]{1,18}", r"[0-9]*\.?[0-9]+"
    takes = [*found.takes.values()]
    kinds = [whole if isinstance(own.default, int) else real for own in takes]
    if len(texts) > len(takes) or not all(map(re.fullmatch, kinds, texts)):
        usage = ":".join([found.name, *(own.name.upper() for own in takes)])
        raise ValueError(
            f"augmentation: expected a name and numbers, as in {usage}, got {item!r}; omit numbers "
            "from the right for their defaults"
        )
    return [float(text) if "." in text else int(text) for text in texts]
