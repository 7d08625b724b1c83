"""The same state of training in different formats: written and flushed to disk, and read in place.

Formats without `together` are written and read by rank 0; with data parallelism it has everything.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from pydtnn.tools.interchange import export_onnx, import_onnx
from pydtnn.training.checkpoint import load_checkpoint
from pydtnn.training.checkpoint.pieces import pieces_in_place
from pydtnn.training.checkpoint.saving import Saver
from pydtnn.training.trainer import Trainer


def arrays_of(trainer: Trainer) -> dict[str, np.ndarray]:
    """Return views of the parameters, the running statistics and the state of the optimizer."""
    arrays = {}
    for name, part in (("model", trainer.model), ("optimizer", trainer.optimizer)):
        for piece in pieces_in_place(part, trainer.model) or ():
            region = piece.region
            arrays[f"{name}/{region.name}"] = piece.values.reshape(region.shape)
    return arrays


def flush(paths: Iterable[Path]) -> None:
    """Flush files to disk."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())


class Format:
    """A format: `write` a state into an empty folder, and `read` it into the same arrays."""

    library = ""
    together = False
    weights_only = False
    file = ""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.arrays = arrays_of(trainer)

    @classmethod
    def is_there(cls) -> bool:
        """Whether its library can be imported."""
        return not cls.library or importlib.util.find_spec(cls.library) is not None

    def write(self, folder: Path) -> None:
        """Write the state."""
        self.encode(folder / self.file)
        flush([folder / self.file])

    def read(self, folder: Path) -> None:
        """Read the state."""
        for name, values in self.decode(folder / self.file).items():
            self.arrays[name][...] = values

    def encode(self, path: Path) -> None:
        """Write one file."""
        raise NotImplementedError

    def decode(self, path: Path) -> dict[str, Any]:
        """Return the arrays of a file."""
        raise NotImplementedError


class Ours(Format):
    """Files of 16 MiB with checksums, written by all ranks, and verified before they are loaded."""

    together = True

    def write(self, folder: Path) -> None:
        self.save(folder, background=False)

    def save(self, folder: Path, *, background: bool) -> float:
        """Save; return the time for which training would stop, in s."""
        saver = Saver(folder, keep=1)
        problem = saver.start(self.trainer, background=background)
        blocked = saver.blocked
        if problem := problem or saver.settle(self.trainer.comm):
            raise OSError(problem)
        return blocked

    def read(self, folder: Path) -> None:
        load_checkpoint(folder, self.trainer)


class Safetensors(Format):
    """One safetensors file."""

    library, file = "safetensors", "state.safetensors"

    def encode(self, path: Path) -> None:
        from safetensors.numpy import save_file

        save_file(self.arrays, path)

    def decode(self, path: Path) -> dict[str, Any]:
        from safetensors.numpy import load_file

        return dict(load_file(path))


class Npz(Format):
    """NumPy's archive."""

    file = "state.npz"
    save = staticmethod(np.savez)

    def encode(self, path: Path) -> None:
        self.save(path, **self.arrays)

    def decode(self, path: Path) -> dict[str, Any]:
        with np.load(path) as file:
            return dict(file)


class Compressed(Npz):
    """NumPy's archive, compressed by deflate."""

    save = staticmethod(np.savez_compressed)


class Hdf5(Format):
    """One HDF5 file."""

    library, file = "h5py", "state.h5"

    def encode(self, path: Path) -> None:
        import h5py

        with h5py.File(path, "w") as file:
            for name, values in self.arrays.items():
                file.create_dataset(name, data=values)

    def decode(self, path: Path) -> dict[str, Any]:
        import h5py

        with h5py.File(path) as file:
            return {name: file[name][()] for name in self.arrays}


class Torch(Format):
    """`torch.save` and `torch.load`."""

    library, file = "torch", "state.pt"

    def encode(self, path: Path) -> None:
        import torch

        torch.save({name: torch.from_numpy(a) for name, a in self.arrays.items()}, path)

    def decode(self, path: Path) -> dict[str, Any]:
        import torch

        return {name: value.numpy() for name, value in torch.load(path).items()}


class Distributed(Format):
    """PyTorch's distributed checkpoint (DCP), in which every rank writes a file."""

    library, together = "torch", True

    def state(self) -> dict[str, Any]:
        """Return tensors that share memory with the arrays."""
        import torch

        return {name: torch.from_numpy(values) for name, values in self.arrays.items()}

    def write(self, folder: Path) -> None:
        from torch.distributed import checkpoint

        checkpoint.save(self.state(), checkpoint_id=folder)  # which flushes its files

    def read(self, folder: Path) -> None:
        from torch.distributed import checkpoint

        checkpoint.load(self.state(), checkpoint_id=folder)


class Onnx(Format):
    """An ONNX file: the network and its weights, without the state of the optimizer."""

    library, file, weights_only = "onnx", "network.onnx", True

    def encode(self, path: Path) -> None:
        export_onnx(self.trainer.model, path)

    def read(self, folder: Path) -> None:
        import_onnx(folder / self.file, verify=False)


FORMATS: dict[str, type[Format]] = {
    "ours": Ours,
    "safetensors": Safetensors,
    "npz": Npz,
    "npz, compressed": Compressed,
    "HDF5": Hdf5,
    "torch.save": Torch,
    "DCP": Distributed,
    "ONNX (weights)": Onnx,
}
