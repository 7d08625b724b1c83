"""The training steps that are measured on a GPU: ours, and the same of PyTorch in two ways.

As in `work.py` a step is forward, loss, backward and update (SGD with momentum and weight decay) on
one batch of random numbers. It lies in pinned memory and is brought to the GPU in every step, as in
training. bfloat16 means ours with float32 master weights, theirs under autocast; float32 lets both
round to TF32 before they multiply.
"""

from __future__ import annotations

import os
from tempfile import TemporaryDirectory

import numpy as np
from work import CIFAR, IMAGENET, Work

WORK = {
    "resnet44-64": Work("resnet44", CIFAR, 10, 64),
    "resnet44": Work("resnet44", CIFAR, 10, 128),
    "resnet44-512": Work("resnet44", CIFAR, 10, 512),
    "resnet44-2048": Work("resnet44", CIFAR, 10, 2048),
    "resnet50-64": Work("resnet50", IMAGENET, 1000, 64),
    "resnet50": Work("resnet50", IMAGENET, 1000, 128),
    "vgg16_bn": Work("vgg16_bn", CIFAR, 10, 128),
}
DTYPES = ("float32", "bfloat16")
PEERS = ("eager", "compiled")


class OursOnGpu:
    """Our side: `step()`, `finish()`, and `memory()` in MB.

    Parameters
    ----------
    name : str
        Of the work.
    dtype : str
    """

    def __init__(self, name: str, dtype: str) -> None:
        from pydtnn.comm import create_communicator
        from pydtnn.comm.exchange import AllReduce
        from pydtnn.data import Batch
        from pydtnn.kernels.cuda import create_cuda_backend
        from pydtnn.model import Model
        from pydtnn.models import create_net
        from pydtnn.optimizers import SGD
        from pydtnn.trainer import Trainer

        self.cache = TemporaryDirectory()
        os.environ["PYDTNN_CACHE"] = self.cache.name  # algorithms are chosen anew
        work = WORK[name]
        self.backend = create_cuda_backend(tf32=True)
        model = Model(
            create_net(work.net, work.classes, work.shape),
            work.shape,
            backend=self.backend,
            dtype=dtype,
        )
        self.trainer = Trainer(
            model,
            SGD(0.01, momentum=0.9, weight_decay=1e-4),
            metrics=(),
            exchange=AllReduce(create_communicator("serial")),
        )
        self.trainer.exchange.start(model.buckets)
        x, target = work.data()
        self.batch = Batch(x, target, np.arange(work.batch), 0, work.batch)

    def step(self) -> None:
        """Make one training step; the GPU may not have finished it."""
        self.trainer.train_step(self.batch)

    def finish(self) -> None:
        """Wait until the GPU has done all steps."""
        self.backend.synchronize()

    def memory(self) -> float:
        """Memory of the GPU that our arrays have needed, in MB."""
        return self.backend.memory.pool.total_bytes() / 2**20


class TheirsOnGpu:
    """PyTorch's side: the same methods.

    `channels_last`, cuDNN's algorithms by its own measurement, the optimizer in one fused kernel:
    what its documentation recommends for speed.

    Parameters
    ----------
    name, dtype
        As of `OursOnGpu`.
    peer : str
        "eager", or "compiled" by torch.compile(mode="reduce-overhead"), with CUDA graphs.
    """

    def __init__(self, name: str, dtype: str, peer: str) -> None:
        import torch
        from torch_twin import Peer, plain_graph, to_torch

        self.torch = torch
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")  # TF32, which cuDNN is allowed by default
        work = WORK[name]
        self.net = Peer(plain_graph(work.net, work.classes, work.shape)).cuda()
        self.call = torch.compile(self.net, mode="reduce-overhead") if peer == "compiled" else None
        images, classes = work.data()
        self.x = to_torch(images).pin_memory()
        self.target = torch.from_numpy(classes).pin_memory()
        self.optimizer = torch.optim.SGD(
            self.net.parameters(), 0.01, momentum=0.9, weight_decay=1e-4, fused=True
        )
        self.half = dtype == "bfloat16"

    def step(self) -> None:
        """Make one training step; the GPU may not have finished it."""
        torch = self.torch
        x = self.x.to("cuda", non_blocking=True)
        target = self.target.to("cuda", non_blocking=True)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=self.half):
            y = (self.call or self.net)(x)
            loss = torch.nn.functional.cross_entropy(y, target)
        loss.backward()
        self.optimizer.step()

    def finish(self) -> None:
        """Wait until the GPU has done all steps."""
        self.torch.cuda.synchronize()

    def memory(self) -> float:
        """Memory of the GPU that PyTorch has taken, in MB."""
        return self.torch.cuda.max_memory_reserved() / 2**20
