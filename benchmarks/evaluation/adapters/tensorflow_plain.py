"""TensorFlow without Keras: operations, variables, and sums of MultiWorkerMirroredStrategy."""

import os

from functions import apply
from protocol import Job

job = Job()

import tensorflow as tf  # noqa: E402
from tensorflow_ranks import start, step_of, trace  # noqa: E402

strategy = start(job)


def convolution(x, _, kernel, stride, w):
    pad = [kernel // 2] * 2
    return tf.nn.conv2d(x, w, stride, [[0, 0], pad, pad, [0, 0]])


def norm(x, gamma, beta):
    return tf.compat.v1.nn.fused_batch_norm(x, gamma, beta, epsilon=1e-5)[0]


FUNCTIONS = {
    "conv": convolution,
    "bn": norm,
    "dense": lambda x, _, w, b: x @ w + b,
    "maxpool": lambda x, size: tf.nn.max_pool2d(x, size, size, "VALID"),
    "gap": lambda x: tf.reduce_mean(x, (1, 2)),
    "flatten": lambda x: tf.reshape(x, (len(x), -1)),
    "relu": tf.nn.relu,
}
weights = [tf.Variable(w) for w in job.weights]
momenta = [tf.Variable(tf.zeros_like(w), trainable=False) for w in weights]


def predict(x):
    return apply(FUNCTIONS, job.layers, iter(weights), tf.constant(x))


def update(x, y):
    with tf.GradientTape() as tape:
        logits = apply(FUNCTIONS, job.layers, iter(weights), x)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
        loss = tf.reduce_mean(losses)
    ranks = tf.distribute.get_replica_context()
    gradients = ranks.all_reduce(tf.distribute.ReduceOp.MEAN, tape.gradient(loss, weights))
    for w, momentum, gradient in zip(weights, momenta, gradients, strict=True):
        momentum.assign(job.momentum * momentum + gradient)
        w.assign_sub(job.rate * momentum)
    return loss


job.measure(step_of(strategy, update), None, tf.__version__, trace, predict)
os._exit(0)  # workers wait for each other at the end
