"""TensorFlow and Keras: MultiWorkerMirroredStrategy, its own collectives over gRPC."""

import json
import os
from contextlib import contextmanager

from protocol import Job, write_events

job = Job()
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
hosts = [f"{address}:{job.port + rank}" for rank, address in enumerate(job.addresses)]
if job.ranks > 1:
    task = {"type": "worker", "index": job.rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": hosts}, "task": task})

import tensorflow as tf  # noqa: E402
from tensorflow.tsl.profiler.protobuf import xplane_pb2  # noqa: E402

tf.config.threading.set_intra_op_parallelism_threads(job.threads)
tf.config.threading.set_inter_op_parallelism_threads(1)
many = job.ranks > 1
strategy = tf.distribute.MultiWorkerMirroredStrategy() if many else tf.distribute.get_strategy()
layers = tf.keras.layers


def build(given, x, weights):
    """Return the tensor after a list of layers, and append the layers that have weights."""
    for kind, *numbers in given:
        if kind == "conv":
            filters, kernel, stride = numbers
            x = layers.ZeroPadding2D(kernel // 2)(x) if kernel > 1 else x
            layer = layers.Conv2D(filters, kernel, stride, use_bias=False)
        elif kind == "bn":
            layer = layers.BatchNormalization(epsilon=1e-5)
        elif kind == "dense":
            layer = layers.Dense(numbers[0])
        elif kind == "maxpool":
            layer = layers.MaxPooling2D(numbers[0])
        elif kind == "residual":
            body = build(numbers[0], x, weights)
            x = layers.Add()([body, build(numbers[1], x, weights) if numbers[1] else x])
            continue
        else:
            kinds = {"gap": layers.GlobalAveragePooling2D, "flatten": layers.Flatten}
            layer = kinds.get(kind, layers.ReLU)()
        x = layer(x)
        if kind in ("conv", "bn", "dense"):
            weights.append(layer)
    return x


with strategy.scope():
    with_weights: list = []
    image = tf.keras.Input(job.x.shape[1:])
    model = tf.keras.Model(image, build(job.layers, image, with_weights))
    optimizer = tf.keras.optimizers.SGD(job.rate, momentum=job.momentum)
    optimizer.build(model.trainable_variables)
values = iter(job.weights)
for layer in with_weights:
    for own in layer.trainable_variables:
        own.assign(next(values))


def update(x, y):
    with tf.GradientTape() as tape:
        losses = tf.keras.losses.sparse_categorical_crossentropy(
            y, model(x, training=True), from_logits=True
        )
        own = tf.reduce_mean(losses)
        share = own / job.ranks  # gradients are summed over the ranks
    variables = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(share, variables), variables, strict=True))
    return own


@tf.function
def train(x, y):
    return strategy.run(update, (x, y))


def step(x, y):
    return strategy.experimental_local_results(train(tf.constant(x), tf.constant(y)))[0]


@contextmanager
def trace(path):
    folder = path.with_suffix("")
    tf.profiler.experimental.start(str(folder))
    yield lambda index: tf.profiler.experimental.Trace("step")
    tf.profiler.experimental.stop()
    (written,) = folder.rglob("*.xplane.pb")
    events = []
    for plane in xplane_pb2.XSpace.FromString(written.read_bytes()).planes:
        names = plane.event_metadata
        for line in plane.lines:
            for one in line.events:
                start = line.timestamp_ns / 1e3 + one.offset_ps / 1e6
                thread = f"{line.name} {line.id}"
                events.append((names[one.metadata_id].name, thread, start, one.duration_ps / 1e6))
    write_events(path, events)


def predict(x):
    return model(tf.constant(x), training=False)


job.measure(step, None, tf.__version__, trace, predict)
os._exit(0)  # workers wait for each other at the end
