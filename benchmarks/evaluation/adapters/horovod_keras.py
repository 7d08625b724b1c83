"""Horovod on TensorFlow and Keras: a tape whose gradients are averaged by MPI."""

import os

from protocol import Job

job = Job()
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ |= {"HOROVOD_TIMELINE": "DYNAMIC"} if job.traced else {}  # it is started later

import horovod  # noqa: E402
import horovod.tensorflow as hvd  # noqa: E402
import tensorflow as tf  # noqa: E402
from horovod_timeline import trace_of  # noqa: E402
from keras_network import build, losses_of, sgd_of  # noqa: E402
from tensorflow_ranks import trace  # noqa: E402

tf.config.threading.set_intra_op_parallelism_threads(job.threads)
tf.config.threading.set_inter_op_parallelism_threads(1)
hvd.init()
model = build(job)
optimizer = sgd_of(job)
optimizer.build(model.trainable_variables)


@tf.function
def train(x, y):
    with tf.GradientTape() as tape:
        own = tf.reduce_mean(losses_of(model, x, y))
    variables = model.trainable_variables
    gradients = hvd.DistributedGradientTape(tape).gradient(own, variables)
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return own


def step(x, y):
    return train(tf.constant(x), tf.constant(y))


def predict(x):
    return model(tf.constant(x), training=False)


version = f"{horovod.__version__}, TensorFlow {tf.__version__}"
job.measure(step, None, version, trace_of(hvd, trace), predict)
hvd.shutdown()
os._exit(0)
