"""The training steps that the benchmarks measure: ours, and the same of PyTorch.

A step is forward, loss, backward and update (SGD with momentum and weight decay) in float32, on one
batch of random numbers that stays in memory.
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from pydtnn.comm import Communicator


class Work(NamedTuple):
    """A net and its batch."""

    net: str
    shape: tuple[int, int, int]
    classes: int
    batch: int

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Images NHWC and classes."""
        rng = np.random.default_rng(0)
        x = rng.normal(size=(self.batch, *self.shape)).astype("float32")
        return x, rng.integers(self.classes, size=self.batch)


CIFAR, MNIST, IMAGENET = (32, 32, 3), (28, 28, 1), (224, 224, 3)
WORK = {
    "resnet44": Work("resnet44", CIFAR, 10, 64),
    "resnet44-128": Work("resnet44", CIFAR, 10, 128),
    "resnet20": Work("resnet20", CIFAR, 10, 64),
    "vgg16_bn": Work("vgg16_bn", CIFAR, 10, 64),
    "cnn": Work("cnn", MNIST, 10, 64),
    "mlp": Work("mlp", MNIST, 10, 64),
    "resnet18": Work("resnet18", IMAGENET, 1000, 8),
}

VARIANTS = ("full", "no-winograd", "no-fusion")
"""Ours as users get it, without the Winograd algorithms, and without the fusion of layers."""


def resident(peak: bool = False) -> float:
    """Resident memory of this process in MB, now or at its peak."""
    key = "VmHWM" if peak else "VmRSS"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def forget_peak() -> None:
    """Let the peak of resident memory begin anew, at what it is now."""
    Path("/proc/self/clear_refs").write_text("5")


class Ours:
    """Our side of some work: `trainer`, its `model`, and `step()`.

    Algorithms are chosen anew: what others measured on this machine, in busier times or with other
    kernels, must not decide.

    Parameters
    ----------
    name : str
        Of the work.
    threads : int
    variant : str
        One of `VARIANTS`.
    comm : Communicator, optional
        The ranks that share the work; by default this one is alone.
    samples : int, optional
        This rank's part of the batch; the work's own batch by default.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        variant: str = "full",
        comm: Communicator | None = None,
        samples: int | None = None,
    ) -> None:
        from pydtnn.comm import create_communicator
        from pydtnn.data import Batch
        from pydtnn.kernels import create_backend
        from pydtnn.model import Model
        from pydtnn.models import create_net
        from pydtnn.optimizers import SGD
        from pydtnn.parallel.exchange import AllReduce
        from pydtnn.training.trainer import Trainer
        from pydtnn.training.tuning import settle_choices

        self.cache = TemporaryDirectory()
        os.environ["PYDTNN_CACHE"] = self.cache.name
        forget_peak()
        self.before = resident()
        work = WORK[name] if samples is None else WORK[name]._replace(batch=samples)
        tuning = "direct" if variant == "no-winograd" else "measure"
        self.model = Model(
            create_net(work.net, work.classes, work.shape),
            work.shape,
            backend=create_backend("cpu", threads=threads, tuning=tuning),
            fuse=variant != "no-fusion",
        )
        self.trainer = Trainer(
            self.model,
            SGD(0.01, momentum=0.9, weight_decay=1e-4),
            metrics=(),
            exchange=AllReduce(comm or create_communicator("serial")),
        )
        self.trainer.exchange.start(self.model.buckets)
        sizes = self.trainer.comm.gather_object(work.batch)
        if len(sizes) > 1:
            settle_choices(self.model, self.trainer.comm, max(sizes), training=True)
        x, target = work.data()
        self.batch = Batch(x, target, np.arange(work.batch), 0, sum(sizes))

    def step(self) -> None:
        """Make one training step."""
        self.trainer.train_step(self.batch)


class Theirs:
    """PyTorch's side of the same work: `step()`.

    A part of PyTorch imports itself only when the first optimizer is made: `before` is with that
    part, and its size is `late_imports`.
    """

    def __init__(self, name: str, threads: int) -> None:
        import torch
        from torch_twin import Peer, plain_graph, to_torch

        torch.set_num_threads(threads)
        imported = resident()
        import torch._dynamo

        forget_peak()
        self.before = resident()
        self.late_imports = self.before - imported
        work = WORK[name]
        self.net = Peer(plain_graph(work.net, work.classes, work.shape))
        images, classes = work.data()
        self.x, self.target = to_torch(images), torch.from_numpy(classes)
        self.optimizer = torch.optim.SGD(
            self.net.parameters(), 0.01, momentum=0.9, weight_decay=1e-4
        )
        self.loss = torch.nn.functional.cross_entropy

    def step(self) -> None:
        """Make one training step."""
        self.optimizer.zero_grad()
        self.loss(self.net(self.x), self.target).backward()
        self.optimizer.step()
