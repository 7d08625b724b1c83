"""Data files that must be refused."""

from __future__ import annotations

import gzip
import os
import pickle
import struct

import numpy as np


class Command:
    """A pickle that would run a command."""

    def __reduce__(self) -> tuple:
        return os.system, ("touch pickle-has-run",)


def idx(array: np.ndarray, magic: int | None = None) -> bytes:
    head = struct.pack(f">{1 + array.ndim}I", magic or 0x0800 | array.ndim, *array.shape)
    return head + array.astype(np.uint8).tobytes()


IMAGES, LABELS = np.zeros((20, 28, 28)), np.arange(20) % 10
MNIST = {"train-images-idx3-ubyte": idx(IMAGES), "train-labels-idx1-ubyte": idx(LABELS)}
MNIST |= {name.replace("train", "t10k"): content for name, content in MNIST.items()}
RECORDS = np.zeros((20, 3073))
CIFAR = {
    f"{name}.bin": RECORDS.astype(np.uint8).tobytes()
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
}
PICKLES = dict.fromkeys((name.removesuffix(".bin") for name in CIFAR), pickle.dumps(Command()))

DATA = {
    "truncated": ("mnist", MNIST, ("train-images-idx3-ubyte", idx(IMAGES)[:-1]), "is truncated"),
    "too long": (
        "mnist",
        MNIST,
        ("train-images-idx3-ubyte", idx(IMAGES) + b"x"),
        "got more",
    ),
    "mislabelled": (
        "mnist",
        MNIST,
        ("train-labels-idx1-ubyte", idx(LABELS[1:])),
        "got 20 images in",
    ),
    "a wrong label": (
        "mnist",
        MNIST,
        ("t10k-labels-idx1-ubyte", idx(LABELS + 1)),
        "must be in 0..9, got 10; download the file again",
    ),
    "a wrong magic number": (
        "mnist",
        MNIST,
        ("train-images-idx3-ubyte", idx(IMAGES, 0x0D03)),
        "got 0x00000d03; check that images and labels were not exchanged",
    ),
    "damaged gzip": (
        "mnist",
        MNIST,
        ("train-images-idx3-ubyte.gz", gzip.compress(idx(IMAGES))[:-20]),
        "damaged gzip file",
    ),
    "missing": ("mnist", MNIST, ("train-images-idx3-ubyte", None), "but not train-images-idx3-uby"),
    "truncated records": (
        "cifar10",
        CIFAR,
        ("data_batch_3.bin", CIFAR["data_batch_3.bin"][:-1]),
        "must contain records of 3073 bytes, got",
    ),
    "records with a wrong label": (
        "cifar10",
        CIFAR,
        ("data_batch_3.bin", (RECORDS + 77).astype(np.uint8).tobytes()),
        "must be in 0..9, got 77; the file is damaged or belongs to another data set",
    ),
    "a pickle that runs code": (
        "cifar10",
        PICKLES,
        ("data_batch_1", PICKLES["data_batch_1"]),
        "expected only arrays, strings and numbers, got a pickle that refers to",
    ),
    "no pickle": ("cifar10", PICKLES, ("data_batch_1", b"junk"), "it cannot be read"),
}
