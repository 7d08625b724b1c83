"""PaddlePaddle: DataParallel over gloo."""

import os
from contextlib import contextmanager

from functions import apply, channels_first
from protocol import Job

job = Job()
hosts = [f"{address}:{job.port + rank}" for rank, address in enumerate(job.addresses)]
os.environ |= {
    "PADDLE_TRAINER_ID": str(job.rank),
    "PADDLE_TRAINERS_NUM": str(job.ranks),
    "PADDLE_TRAINER_ENDPOINTS": ",".join(hosts),
    "PADDLE_CURRENT_ENDPOINT": hosts[job.rank],
    "PADDLE_MASTER": f"{job.addresses[0]}:{job.port + job.ranks}",
    "PADDLE_DISTRI_BACKEND": "gloo",
}

import paddle  # noqa: E402
import paddle.nn.functional as F  # noqa: E402
from paddle.profiler import Profiler, ProfilerTarget, RecordEvent  # noqa: E402


def norm(x, gamma, beta):
    mean, variance = paddle.zeros_like(gamma), paddle.ones_like(gamma)  # it updates them
    return F.batch_norm(x, mean, variance, gamma, beta, training=True, epsilon=1e-5)


FUNCTIONS = {
    "conv": lambda x, _, kernel, stride, w: F.conv2d(x, w, None, stride, kernel // 2),
    "bn": norm,
    "dense": lambda x, _, w, b: F.linear(x, w, b),
    "maxpool": lambda x, size: F.max_pool2d(x, size),
    "gap": lambda x: x.mean((2, 3)),
    "flatten": lambda x: x.transpose((0, 2, 3, 1)).flatten(1),
    "relu": F.relu,
}


class Network(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        for index, value in enumerate(channels_first(job.weights)):
            given = paddle.nn.initializer.Assign(value)
            made = self.create_parameter(value.shape, default_initializer=given)
            self.add_parameter(f"w{index}", made)

    def forward(self, x):
        return apply(FUNCTIONS, job.layers, iter(self.parameters()), x)


paddle.set_device("cpu")
model = net = Network()
if job.ranks > 1:
    paddle.distributed.init_parallel_env()
    model = paddle.DataParallel(net)
optimizer = paddle.optimizer.Momentum(job.rate, job.momentum, parameters=net.parameters())


def step(x, y):
    images = paddle.to_tensor(x.transpose(0, 3, 1, 2))
    loss = F.cross_entropy(model(images), paddle.to_tensor(y))
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    return loss.item()


def predict(x):
    with paddle.no_grad():
        return net(paddle.to_tensor(x.transpose(0, 3, 1, 2))).numpy()


@contextmanager
def trace(path):
    """Record steps with Paddle's profiler."""

    def export(own):
        own.export(str(path))

    with Profiler(targets=[ProfilerTarget.CPU], on_trace_ready=export):
        yield lambda index: RecordEvent("step")


job.measure(step, None, paddle.__version__, trace, predict)
os._exit(0)
