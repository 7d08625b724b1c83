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
from keras_network import build, losses_of, set_threads, sgd_of  # noqa: E402
from tensorflow.tsl.profiler.protobuf import xplane_pb2  # noqa: E402

set_threads(job)
many = job.ranks > 1
strategy = tf.distribute.MultiWorkerMirroredStrategy() if many else tf.distribute.get_strategy()

with strategy.scope():
    model = build(job)
    optimizer = sgd_of(job)
    optimizer.build(model.trainable_variables)


def update(x, y):
    with tf.GradientTape() as tape:
        own = tf.reduce_mean(losses_of(model, x, y))
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
