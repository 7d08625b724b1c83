"""The training steps that the benchmarks measure: ours, and the same of PyTorch.

A step is forward, loss, backward and update (SGD with momentum and weight decay) on one batch of
random numbers that stays in memory.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pydtnn.utils.machine import restart_peak

if TYPE_CHECKING:
    from pydtnn.comm import Communicator
    from pydtnn.kernels import Backend
    from pydtnn.training.trainer import Trainer


class Work(NamedTuple):
    """A net and its batch; a shape of one number is that of a sequence of tokens."""

    net: str
    shape: tuple[int, ...]
    classes: int
    batch: int
    options: Mapping[str, Any] = {}

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Images NHWC and classes, or tokens and those that follow."""
        rng = np.random.default_rng(0)
        if len(self.shape) == 1:
            text = rng.integers(self.classes, size=(self.batch, self.shape[0] + 1))
            return text[:, :-1].astype("float32"), text[:, 1:]
        x = rng.normal(size=(self.batch, *self.shape)).astype("float32")
        return x, rng.integers(self.classes, size=self.batch)


CIFAR, MNIST, IMAGENET = (32, 32, 3), (28, 28, 1), (224, 224, 3)
USUAL = {
    "resnet44": Work("resnet44", CIFAR, 10, 64),
    "resnet44-128": Work("resnet44", CIFAR, 10, 128),
    "resnet20": Work("resnet20", CIFAR, 10, 64),
    "vgg16_bn": Work("vgg16_bn", CIFAR, 10, 64),
    "cnn": Work("cnn", MNIST, 10, 64),
    "mlp": Work("mlp", MNIST, 10, 64),
    "resnet18": Work("resnet18", IMAGENET, 1000, 8),
}
ZOO = {
    "mobilenet_v2": Work("mobilenet_v2", IMAGENET, 1000, 8),
    "densenet121": Work("densenet121", IMAGENET, 1000, 8),
    "inception_v3": Work("inception_v3", (299, 299, 3), 1000, 4),
    "vit_tiny": Work("vit_tiny", IMAGENET, 1000, 16),
    "gpt": Work("gpt", (256,), 256, 8),
    "cosmoflow": Work("cosmoflow", (64, 64, 64, 4), 4, 2),
}
WORK = USUAL | ZOO

LR, MOMENTUM, DECAY = 0.01, 0.9, 1e-4

VARIANTS = ("full", "no-winograd", "no-fusion")
"""Ours as users get it, without the Winograd algorithms, and without the fusion of layers."""


def resident(peak: bool = False) -> float:
    """Resident memory of this process in MB, now or at its peak."""
    key = "VmHWM" if peak else "VmRSS"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def create_several(parser: argparse.ArgumentParser) -> Communicator:
    """Return the communicator of the ranks that a launcher has started; end if there is one."""
    from pydtnn.comm import create_communicator

    comm = create_communicator()
    if comm.size == 1:
        parser.error("expected several ranks, got 1; start it with mpirun -np 2 python -m ...")
    return comm


def rest(comm: Communicator) -> None:
    """Wait for rank 0, which works meanwhile, without using the core."""
    word = np.zeros(1)
    if comm.rank == 0:
        for rank in range(1, comm.size):
            comm.send(word, rank)
    else:
        request = comm.irecv(word, 0)
        while not request.test():
            time.sleep(0.001)
    comm.barrier()


Ask = Callable[[float | None], int]
"""Takes the seconds per step of the last turn, returns the number of steps of the next."""


def create_trainer(
    work: Work,
    backend: Backend,
    comm: Communicator | None = None,
    micro_batches: int | None = None,
    schedule: str = "1f1b",
    **options: Any,
) -> Trainer:
    """Make the trainer of our side, a pipeline with micro-batches; `options` are of `Model`."""
    from pydtnn.comm import create_communicator
    from pydtnn.model import Model
    from pydtnn.models import create_net
    from pydtnn.optimizers import SGD
    from pydtnn.parallel.exchange import AllReduce
    from pydtnn.training.trainer import Trainer

    net = create_net(work.net, work.classes, work.shape, **work.options)
    return Trainer(
        Model(net, work.shape, backend=backend, pipeline_schedule=schedule, **options),
        SGD(LR, momentum=MOMENTUM, weight_decay=DECAY),
        metrics=(),
        exchange=AllReduce(comm or create_communicator("serial")),
        progress=False,
        micro_batches=micro_batches,
    )


class Stepping:
    """A side that makes one step at a time."""

    note = ""

    def step(self) -> None:
        """Make one training step."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait until steps are over, where they may not be when `step` returns."""

    def turns(self, ask: Ask) -> None:
        """Make steps until there are none to make."""
        seconds: float | None = None
        while steps := ask(seconds):
            self.synchronize()
            start = time.perf_counter()
            for _ in range(steps):
                self.step()
            self.synchronize()
            seconds = (time.perf_counter() - start) / steps


class Ours(Stepping):
    """Our side of some work on the CPU: `trainer`, its `model`, and `step()`.

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
    **options
        Of `Model`.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        variant: str = "full",
        comm: Communicator | None = None,
        samples: int | None = None,
        **options: Any,
    ) -> None:
        import numpy.random  # noqa: F401 (imports are not part of a step, on either side)

        import pydtnn.kernels.cpu
        import pydtnn.models
        import pydtnn.optimizers
        import pydtnn.training.trainer  # noqa: F401
        from pydtnn.data import Batch
        from pydtnn.kernels import create_backend
        from pydtnn.training.preparation import autotune

        self.cache = TemporaryDirectory()
        os.environ["PYDTNN_CACHE"] = self.cache.name
        restart_peak()
        self.before = resident()
        work = WORK[name] if samples is None else WORK[name]._replace(batch=samples)
        tuning = "direct" if variant == "no-winograd" else "measure"
        backend = create_backend("cpu", threads=threads, tuning=tuning)
        self.trainer = create_trainer(work, backend, comm, fuse=variant != "no-fusion", **options)
        self.model = self.trainer.model
        self.trainer.exchange.start(self.model.buckets)
        sizes = self.trainer.comm.gather_object(work.batch)
        if len(sizes) > 1:
            autotune(self.model, self.trainer.comm, max(sizes), training=True)
        x, target = work.data()
        self.batch = Batch(x, target, np.arange(work.batch), 0, sum(sizes))

    def step(self) -> None:
        self.trainer.train_step(self.batch)


class Theirs(Stepping):
    """PyTorch's side of the same work: `step()`.

    Parameters
    ----------
    work : Work
    device : str
    dtype : str
        "float32", or "bfloat16": with `torch.autocast`.
    **options
        Of PyTorch's SGD.
    """

    def __init__(
        self, work: Work, device: str = "cpu", dtype: str = "float32", **options: Any
    ) -> None:
        import torch

        from benchmarks.common.torch_twin import Peer, plain_graph, to_torch

        self.net: Any = Peer(plain_graph(work.net, work.classes, work.shape)).to(device)
        images, classes = work.data()
        inputs = to_torch(images)
        self.batch = [inputs if images.ndim > 2 else inputs.long(), torch.from_numpy(classes)]
        self.optimizer = torch.optim.SGD(
            self.net.parameters(), LR, momentum=MOMENTUM, weight_decay=DECAY, **options
        )
        self.cross_entropy = torch.nn.functional.cross_entropy
        self.autocast = torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16")

    def loss(self, x: Any, target: Any) -> Any:
        """Compute the loss."""
        with self.autocast:
            return self.cross_entropy(self.net(x).flatten(0, -2), target.flatten())

    def next(self) -> list[Any]:
        """Return the batch of the next step."""
        return self.batch

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss(*self.next()).backward()
        self.optimizer.step()
