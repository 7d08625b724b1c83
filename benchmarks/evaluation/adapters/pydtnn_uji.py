"""PyDTNN of the Universitat Jaume I, 3.11: NumPy and Cython backends, started by mpirun."""

from protocol import Job, trace_sums

job = Job()

from functools import partial  # noqa: E402
from importlib.metadata import version  # noqa: E402

import numpy as np  # noqa: E402

from pydtnn.activations.log_softmax import LogSoftmax  # noqa: E402
from pydtnn.activations.relu import Relu  # noqa: E402
from pydtnn.layers.adaptive_average_pool_2d import AdaptiveAveragePool2D  # noqa: E402
from pydtnn.layers.addition_block import AdditionBlock  # noqa: E402
from pydtnn.layers.batch_normalization import BatchNormalization  # noqa: E402
from pydtnn.layers.conv_2d import Conv2D  # noqa: E402
from pydtnn.layers.fc import FC  # noqa: E402
from pydtnn.layers.flatten import Flatten  # noqa: E402
from pydtnn.layers.identity import Identity  # noqa: E402
from pydtnn.layers.max_pool_2d import MaxPool2D  # noqa: E402
from pydtnn.model import Model  # noqa: E402

height, width, channels = job.x.shape[1:]
model = Model(
    dataset_name="synthetic",
    synthetic_train_samples=job.batch * job.ranks,
    synthetic_input_shape=(channels, height, width),
    synthetic_output_shape=(10,),
    batch_size=job.batch,
    parallel_data=job.ranks > 1,
    tensor_format="nhwc",
    optimizer_name="sgd",
    learning_rate=job.rate,
    learning_rate_scaling=False,
    optimizer_momentum=job.momentum,
    schedulers_names=(),
)


def build(given):
    made = []
    for kind, *numbers in given:
        if kind == "conv":
            filters, kernel, stride = numbers
            pad = kernel // 2
            made.append(Conv2D(filters, kernel, padding=pad, stride=stride, use_bias=False))
        elif kind == "bn":
            made.append(BatchNormalization(epsilon=1e-5))
        elif kind == "dense":
            made.append(FC(shape=(numbers[0],)))
        elif kind == "maxpool":
            made.append(MaxPool2D(pool_shape=(numbers[0],) * 2, stride=numbers[0]))
        elif kind == "residual":
            made.append(AdditionBlock(build(numbers[0]), build(numbers[1])))
        elif kind == "gap":
            made += [AdaptiveAveragePool2D((1, 1)), Flatten()]
        else:
            made.append({"relu": Relu, "flatten": Flatten}[kind]())
    return made


model.add_layers([Identity(shape=job.x.shape[1:]), *build(job.layers), LogSoftmax()])
if not model._model_inited:
    model._model_init()
model.rank_weight = 1 / job.ranks  # as its loop of training sets it
values = iter(job.weights)
for layer in model.get_all_layers():
    if isinstance(layer, Conv2D | BatchNormalization | FC):
        weights = next(values)  # of convolutions the input channels come first here
        layer.weights[...] = weights.transpose(2, 0, 1, 3) if weights.ndim == 4 else weights
        if not isinstance(layer, Conv2D):
            layer.biases[...] = next(values)


def step(x, y):
    return model._train_batch(x, np.eye(10, dtype=x.dtype)[y])[0] / len(x)  # of all samples


trace = partial(trace_sums, owner=model, name="_layer_reduce_sync")
job.measure(step, version=version("pydtnn"), trace=trace)
