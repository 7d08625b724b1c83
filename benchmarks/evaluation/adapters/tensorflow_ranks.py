"""What adapters of TensorFlow's MultiWorkerMirroredStrategy share: its start, and its profiler."""

import json
import os
from contextlib import contextmanager

from protocol import write_events

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2


def start(job):
    """Return the strategy of a job: collectives over gRPC, nothing on one rank."""
    tf.config.threading.set_intra_op_parallelism_threads(job.threads)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    if job.ranks == 1:
        return tf.distribute.get_strategy()
    hosts = [f"{address}:{job.port + rank}" for rank, address in enumerate(job.addresses)]
    task = {"type": "worker", "index": job.rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": hosts}, "task": task})
    return tf.distribute.MultiWorkerMirroredStrategy()


def step_of(strategy, update):
    """Return a function that trains a step by `update(x, y)`, which returns the loss."""
    train = tf.function(lambda x, y: strategy.run(update, (x, y)))

    def step(x, y):
        return strategy.experimental_local_results(train(tf.constant(x), tf.constant(y)))[0]

    return step


@contextmanager
def trace(path):
    """Record steps with TensorFlow's profiler."""
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
