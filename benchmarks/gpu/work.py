"""The training steps that are measured on a GPU: ours, and the same of PyTorch in two ways.

A step is forward, loss, backward and update (SGD with momentum and weight decay). Ours are those of
`Trainer.fit`, as `pydtnn.train` makes them: threads gather uint8 images from memory, which the GPU
normalises, and steps are replays of a CUDA graph where they can be. PyTorch's loop finds its batch
prepared, in float32, in pinned memory, and copies the next one on a stream of its own while a step
runs; so it does a little less. bfloat16 means ours with float32 master weights, theirs under
autocast; float32 lets both round to TF32 before they multiply.

A side makes as many steps as it is told, again and again: `turns` takes a function that is called
with the seconds per step of the last turn (None at first) and returns the steps of the next, 0 to
end. `device` may be "cpu": a way to try the scripts out, not to measure anything.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.common import work
from benchmarks.common.work import CIFAR, IMAGENET, Ask, Work, create_trainer
from pydtnn.callbacks import Callback
from pydtnn.data import Dataset

WORK = {
    "resnet44-64": Work("resnet44", CIFAR, 10, 64),
    "resnet44-128": Work("resnet44", CIFAR, 10, 128),
    "resnet44-512": Work("resnet44", CIFAR, 10, 512),
    "resnet44-2048": Work("resnet44", CIFAR, 10, 2048),
    "resnet50-64": Work("resnet50", IMAGENET, 1000, 64),
    "resnet50-128": Work("resnet50", IMAGENET, 1000, 128),
    "vgg16_bn-128": Work("vgg16_bn", CIFAR, 10, 128),
    "mlp-8": Work("mlp", (4, 4, 1), 10, 8),
}
"""The last one is there to try the scripts out."""

DTYPES = ("float32", "bfloat16")
PEERS = ("eager", "compiled")
THREADS = 6  # that gather batches for our side


class Repeated(Dataset):
    """Few random images, again and again: an epoch is longer than any measurement."""

    name = "repeated"
    DISTINCT, STEPS = 4, 500

    def __init__(self, work: Work) -> None:
        rng = np.random.default_rng(0)
        self.input_shape, self.classes = work.shape, work.classes
        self.held = self.DISTINCT * work.batch
        self.x = rng.integers(256, size=(self.held, *work.shape), dtype="uint8")
        self.y = rng.integers(work.classes, size=self.held)
        self.samples = self.STEPS * work.batch

    def __len__(self) -> int:
        return self.samples

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        own = indices % self.held
        return self.x[own], self.y[own]

    def measure(self) -> Any:
        """Take the statistics of the images that are there."""
        return self.subset(np.arange(min(self.held, 256))).measure()


class Ended(Exception):
    """Leaves `Trainer.fit` when no more steps are asked for."""


class Turns(Callback):
    """Times turns of steps inside of `Trainer.fit`; between two turns the GPU is idle."""

    def __init__(self, ask: Ask, finish: Callable[[], None]) -> None:
        self.ask, self.finish = ask, finish
        self.begin(None)

    def begin(self, seconds: float | None) -> None:
        """Ask how many steps the next turn has."""
        self.steps = self.left = self.ask(seconds)
        if not self.steps:
            raise Ended
        self.start = time.perf_counter()

    def on_step_end(self, trainer: Any) -> None:
        """Count a step; wait for the GPU after the last one of a turn."""
        self.left -= 1
        if not self.left:
            self.finish()
            self.begin((time.perf_counter() - self.start) / self.steps)


class Ours:
    """Our side.

    Parameters
    ----------
    work : Work
    dtype : str
    device : str

    Attributes
    ----------
    note : str
        How steps were made, once there were some.
    """

    note = ""

    def __init__(self, work: Work, dtype: str, device: str) -> None:
        self.work = work
        self.backend = create_backend(device)
        self.data = Repeated(work)
        self.trainer = create_trainer(work, self.backend, dtype=dtype)

    def turns(self, ask: Ask) -> None:
        """Make steps until there are none to make."""
        try:
            self.trainer.callbacks = [Turns(ask, lambda: finish(self.backend))]
            self.trainer.fit(
                self.data, epochs=10**6, batch_size=self.work.batch, loader_threads=THREADS
            )
        except Ended:
            self.note = self.trainer.steps.graph if self.trainer.step else ""

    def memory(self) -> float:
        """Memory of the GPU that our arrays have needed, in MB."""
        return self.backend.memory.peak_held / 2**20 if self.backend.name == "cuda" else 0.0


def create_backend(device: str) -> Any:
    """Make the backend that is measured: of a GPU with TF32, or of the CPU."""
    if device == "cuda":
        from pydtnn.kernels.cuda import create_cuda_backend

        return create_cuda_backend(tf32=True)
    from pydtnn.kernels import create_backend as create

    return create(device, threads=1)


def finish(backend: Any) -> None:
    """Wait until the GPU has done all that it was told."""
    if backend.name == "cuda":
        backend.synchronize()


class Theirs(work.Theirs):
    """PyTorch's side, the same methods.

    `channels_last`, cuDNN's algorithms by its own measurement, the optimizer in one fused kernel:
    what its documentation recommends for speed. Compiled, forward and loss are one graph.

    Parameters
    ----------
    work, dtype, device
        As of `Ours`.
    peer : str
        "eager", or "compiled" by torch.compile(mode="reduce-overhead"), with CUDA graphs.
    """

    def __init__(self, work: Work, dtype: str, device: str, peer: str) -> None:
        self.torch, self.device = settle_torch(), device
        super().__init__(work, device, fused=True)
        self.batch = [pinned(tensor, device) for tensor in self.batch]
        self.half = dtype == "bfloat16"
        if peer == "compiled":
            self.loss = compiled(self.loss)

    def loss(self, x: Any, target: Any) -> Any:
        with self.torch.autocast(self.device, self.torch.bfloat16, enabled=self.half):
            return self.cross_entropy(self.net(x), target)

    def next(self) -> list[Any]:
        return self.feed.next()

    def synchronize(self) -> None:
        self.feed.synchronize()

    def turns(self, ask: Ask) -> None:
        self.feed = Ahead(self.batch, self.device)
        super().turns(ask)

    def memory(self) -> float:
        """Memory of the GPU that PyTorch has taken, in MB."""
        return self.torch.cuda.max_memory_reserved() / 2**20 if self.device == "cuda" else 0.0


def settle_torch() -> Any:
    """Import PyTorch, and let it be as fast as it can with TF32."""
    import torch
    from torch._inductor import config

    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")  # TF32, which cuDNN is allowed by default
    config.autotune_local_cache = False  # what was timed while the GPU was busy must not stay
    return torch


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile with CUDA graphs, for one shape of batches."""
    import torch

    torch._dynamo.reset()
    return torch.compile(function, mode="reduce-overhead", dynamic=False)


def pinned(tensor: Any, device: str) -> Any:
    """Return a tensor from which a GPU can copy by itself."""
    return tensor.pin_memory() if device == "cuda" else tensor


class Ahead:
    """Hands out a batch on the device while the next one is copied there on another stream.

    Parameters
    ----------
    batch : list of Tensor
        In pinned memory.
    device : str
    """

    def __init__(self, batch: list[Any], device: str) -> None:
        import torch

        self.torch, self.batch, self.device = torch, batch, device
        self.stream = torch.cuda.Stream() if device == "cuda" else None
        self.waiting = self.copy()

    def copy(self) -> list[Any]:
        """Begin to copy."""
        if self.stream is None:
            return [tensor.clone() for tensor in self.batch]
        with self.torch.cuda.stream(self.stream):
            return [tensor.to(self.device, non_blocking=True) for tensor in self.batch]

    def next(self) -> list[Any]:
        """Return what was copied, and begin to copy again."""
        if self.stream is not None:
            current = self.torch.cuda.current_stream()
            current.wait_stream(self.stream)
            for tensor in self.waiting:
                tensor.record_stream(current)
        batch, self.waiting = self.waiting, self.copy()
        return batch

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.stream is not None:
            self.torch.cuda.synchronize()


def create_side(side: str, device: str, name: str, dtype: str) -> Ours | Theirs:
    """Make a side of some work."""
    if side == "ours":
        return Ours(WORK[name], dtype, device)
    return Theirs(WORK[name], dtype, device, side)


def release(device: str) -> None:
    """Give memory that nobody uses any more back to the GPU, and forget how much it was."""
    gc.collect()
    if device == "cuda" and "torch" in sys.modules:
        cuda = sys.modules["torch"].cuda
        cuda.empty_cache()
        cuda.reset_peak_memory_stats()
    if device == "cuda" and "cupy" in sys.modules:
        sys.modules["cupy"].get_default_memory_pool().free_all_blocks()
