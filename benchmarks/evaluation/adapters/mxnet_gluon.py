"""MXNet: a hybridized Gluon block and a Trainer over the parameter servers of dist_sync."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from itertools import pairwise

from functions import apply, channels_first
from protocol import Job, timed, write_events

job = Job()
os.environ |= {
    "DMLC_PS_ROOT_URI": job.addresses[0],
    "DMLC_PS_ROOT_PORT": str(job.port),
    "DMLC_NUM_WORKER": str(job.ranks),
    "DMLC_NUM_SERVER": str(job.ranks),  # each with a part of the weights
    "DMLC_NODE_HOST": job.addresses[job.rank],
}
if job.ranks > 1:
    for role in ("server", *(["scheduler"] if job.rank == 0 else [])):
        # PR_SET_PDEATHSIG, SIGTERM: it ends with this process
        program = "import ctypes; ctypes.CDLL(None).prctl(1, 15); import mxnet"
        subprocess.Popen([sys.executable, "-c", program], env=os.environ | {"DMLC_ROLE": role})
os.environ["DMLC_ROLE"] = "worker"

import mxnet as mx  # noqa: E402
from mxnet import autograd, gluon  # noqa: E402


def functions(F, statistics):
    """Return the functions of a module, nd or sym; batch norm updates statistics."""

    def convolution(x, filters, kernel, stride, w):
        return F.Convolution(
            x, w, num_filter=filters, kernel=(kernel,) * 2, stride=(stride,) * 2,
            pad=(kernel // 2,) * 2, no_bias=True,
        )  # fmt: skip

    return {
        "conv": convolution,
        "bn": lambda x, gamma, beta: F.BatchNorm(
            x, gamma, beta, *next(statistics), eps=1e-5, fix_gamma=False
        ),
        "dense": lambda x, units, w, b: F.FullyConnected(x, w, b, num_hidden=units),
        "maxpool": lambda x, size: F.Pooling(x, kernel=(size,) * 2, stride=(size,) * 2),
        "gap": lambda x: F.mean(x, axis=(2, 3)),
        "flatten": lambda x: F.flatten(F.transpose(x, (0, 2, 3, 1))),
        "relu": F.relu,
    }


class Network(gluon.HybridBlock):
    """The network; the mean and the variance of each batch norm are parameters, too."""

    def __init__(self):
        super().__init__()
        own = [w.T if w.ndim == 2 else w for w in channels_first(job.weights)]
        gammas = [b for a, b in pairwise(own) if a.ndim == 4 and b.ndim == 1]
        with self.name_scope():
            for index, value in enumerate([*own, *gammas, *gammas]):
                kind = "write" if index < len(own) else "null"
                made = self.params.get(f"p{index:04}", shape=value.shape, grad_req=kind)
                made.initialize()
                made.set_data(mx.nd.array(value))
                setattr(self, f"p{index:04}", made)
        self.counts = len(own), len(own) + len(gammas)

    def hybrid_forward(self, F, x, **given):
        every = [given[name] for name in sorted(given)]
        weights, means, variances = (every[i:j] for i, j in pairwise([0, *self.counts, len(every)]))
        own = functions(F, zip(means, variances, strict=True))
        return apply(own, job.layers, iter(weights), x)


net = Network()
net.hybridize(static_alloc=True, static_shape=True)
loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
trainer = gluon.Trainer(
    net.collect_params(),
    "sgd",
    {"learning_rate": job.rate, "momentum": job.momentum},
    kvstore="dist_sync" if job.ranks > 1 else None,
)


def step(x, y):
    images = mx.nd.array(x.transpose(0, 3, 1, 2))
    with autograd.record():
        losses = loss_of(net(images), mx.nd.array(y))
    losses.backward()
    trainer.step(job.ranks * job.batch)  # gradients are summed over samples and ranks
    mx.nd.waitall()
    return losses.mean().asscalar()


@contextmanager
def trace(path):
    """Record steps with MXNet's profiler, whose clock is that of the machine."""
    mx.profiler.set_config(filename=str(path), profile_symbolic=True, profile_imperative=True)
    mx.profiler.set_state("run")
    events = []
    yield lambda index: timed(events, "step")
    mx.profiler.set_state("stop")
    mx.profiler.dump()
    found = [one for one in json.loads(path.read_text())["traceEvents"] if one["ph"] in "BE"]
    for one, end in zip(found[::2], found[1::2], strict=True):
        events.append((one["name"], str(one["tid"]), one["ts"], end["ts"] - one["ts"]))
    write_events(path, events)


job.measure(step, version=mx.__version__, trace=trace)
