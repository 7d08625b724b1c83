"""pydtnn: data parallelism with the default exchange, started by mpirun."""

from protocol import Job  # first: it sets the cores of this process

job = Job()

from contextlib import contextmanager, nullcontext  # noqa: E402
from itertools import count  # noqa: E402

import numpy as np  # noqa: E402

import pydtnn  # noqa: E402
from pydtnn import layers  # noqa: E402
from pydtnn.comm import create_communicator  # noqa: E402
from pydtnn.data import Batch  # noqa: E402
from pydtnn.kernels import create_backend  # noqa: E402
from pydtnn.model import Model  # noqa: E402
from pydtnn.optimizers import SGD  # noqa: E402
from pydtnn.parallel.exchange import AllReduce  # noqa: E402
from pydtnn.tools.tracing.recorder import Recorder  # noqa: E402
from pydtnn.tools.tracing.writing import Trace  # noqa: E402
from pydtnn.training.trainer import Trainer  # noqa: E402


def build(given, names=None):
    made, names = [], names or (f"w{i}" for i in count())
    for kind, *numbers in given:
        if kind == "conv":
            filters, kernel, stride = numbers
            options = {"stride": stride, "padding": kernel // 2, "bias": False}
            made.append(layers.Conv2d(filters, kernel, name=next(names), **options))
        elif kind == "bn":
            made.append(layers.BatchNorm(name=next(names)))
        elif kind == "dense":
            made.append(layers.Linear(numbers[0], name=next(names)))
        elif kind == "maxpool":
            made.append(layers.MaxPool2d(numbers[0]))
        elif kind == "residual":
            body = build(numbers[0], names)
            made.append(layers.Residual(body, build(numbers[1], names) if numbers[1] else None))
        else:
            kinds = {"relu": layers.ReLU, "gap": layers.GlobalAvgPool2d, "flatten": layers.Flatten}
            made.append(kinds[kind]())
    return layers.Sequential(*made)


comm = create_communicator()
backend = create_backend("cpu", threads=job.threads)
model = Model(build(job.layers), job.x.shape[1:], backend=backend)
order = {"w": 0, "b": 1, "gamma": 0, "beta": 1}


def place(name):
    layer, parameter = name.split(".")[-2:]
    return int(layer[1:]), order[parameter]


for name, weight in zip(sorted(model.parameters, key=place), job.weights, strict=True):
    own = model.parameters[name].master
    own[...] = np.moveaxis(weight, -1, 0)  # ours have the outputs first

total = job.ranks * job.batch


def create_trainer(**options):
    made = Trainer(
        model,
        SGD(lr=job.rate, momentum=job.momentum),
        metrics=(),
        exchange=AllReduce(comm),
        progress=False,
        **options,
    )
    made.exchange.start(model.buckets)
    return made


trainer = create_trainer()


def step(x, y):
    at = np.arange(len(x))
    return trainer.train_step(Batch(x, y, at, 0, total), 0).means()["loss"]


@contextmanager
def trace(path):
    global trainer
    recorder = Recorder()
    trainer = create_trainer(observers=[recorder])
    for index in range(2):  # in which a new trainer prepares itself
        step(*job.batch_of(index))
    with Trace(path.with_name("trace"), recorder, comm):
        yield lambda index: nullcontext(recorder.step(0, index))


def sent():
    return comm.traffic.bytes, comm.traffic.messages


def predict(x):
    return model.predict(x, check_range=False)


def measure():
    job.measure(step, sent, pydtnn.__version__, trace, predict)


if __name__ == "__main__":
    measure()
