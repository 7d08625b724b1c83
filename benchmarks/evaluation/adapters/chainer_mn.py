"""Chainer: functions of NumPy, gradients averaged by ChainerMN's communicator for processors."""

from functools import partial

from functions import apply, channels_first
from protocol import Job, trace_sums

job = Job()

import chainer  # noqa: E402
import chainer.functions as F  # noqa: E402
import chainermn  # noqa: E402

FUNCTIONS = {
    "conv": lambda x, _, kernel, stride, w: F.convolution_2d(x, w, None, stride, kernel // 2),
    "bn": lambda x, gamma, beta: F.batch_normalization(x, gamma, beta, eps=1e-5),
    "dense": lambda x, _, w, b: F.linear(x, w, b),
    "maxpool": lambda x, size: F.max_pooling_2d(x, size),
    "gap": lambda x: F.mean(x, (2, 3)),
    "flatten": lambda x: F.reshape(F.transpose(x, (0, 2, 3, 1)), (len(x), -1)),
    "relu": F.relu,
}
comm = chainermn.create_communicator("naive")
net = chainer.Link()
with net.init_scope():
    for index, w in enumerate(channels_first(job.weights)):
        setattr(net, f"w{index}", chainer.Parameter(w.T if w.ndim == 2 else w))
weights = [getattr(net, f"w{index}") for index in range(len(job.weights))]
optimizer = chainer.optimizers.MomentumSGD(job.rate, job.momentum)
optimizer = chainermn.create_multi_node_optimizer(optimizer, comm)
optimizer.setup(net)
net.cleargrads()
optimizer.update()  # the first one only broadcasts the weights


def step(x, y):
    logits = apply(FUNCTIONS, job.layers, iter(weights), x.transpose(0, 3, 1, 2))
    loss = F.softmax_cross_entropy(logits, y.astype("int32"))
    net.cleargrads()
    loss.backward()
    optimizer.update()
    return loss.array


trace = partial(trace_sums, owner=comm, name="multi_node_mean_grad")
job.measure(step, version=chainer.__version__, trace=trace)
