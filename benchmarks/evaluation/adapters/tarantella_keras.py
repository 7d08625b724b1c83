"""Tarantella 0.8 on TensorFlow 2.10 and Keras: gradients are averaged by GASPI.

It was run with GPI-2 1.5.1 (TCP) and GaspiCxx (the branch dev of June 2022: 1.1.0 has no
`to_global_rank`), compiled without -Werror.

Tarantella is not on PyPI; it is compiled with GPI-2 and GaspiCxx. With the Python that finds it as
build/evaluation/tarantella/bin/python it is compared.
"""

import os
from importlib.util import find_spec

from protocol import Job

job = Job()
hosts = job.folder / f"hosts-{job.rank}"
hosts.write_text("".join(f"{address}\n" for address in job.addresses))
os.environ |= {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "GASPI_MFILE": str(hosts),
    "GASPI_MASTER": job.addresses[0],
    "GASPI_RANK": str(job.rank),
    "GASPI_NRANKS": str(job.ranks),
    "GASPI_SOCKET": str(job.addresses[: job.rank].count(job.addresses[job.rank])),
}

if find_spec("tarantella") is None:
    raise SystemExit(" ".join(__doc__.split("\n\n")[-1].split()))

import tarantella as tnt  # noqa: E402
import tensorflow as tf  # noqa: E402
from keras_network import build, losses_of, sgd_of  # noqa: E402
from version import tnt_version  # noqa: E402

tf.config.threading.set_intra_op_parallelism_threads(job.threads)
tf.config.threading.set_inter_op_parallelism_threads(1)
model = build(job)
optimizer = sgd_of(job)
communicator = tnt.SynchCommunicator(tnt.Group())
communicator.setup_infrastructure([(w, w) for w in model.trainable_variables])


@tf.function(autograph=False)
def train(x, y):
    with tf.GradientTape() as tape:
        own = tf.reduce_mean(losses_of(model, x, y))
    variables = model.trainable_variables
    pairs = [*zip(tape.gradient(own, variables), variables, strict=True)]
    optimizer.apply_gradients(communicator.reduce_gradients(pairs) if job.ranks > 1 else pairs)
    return own


def step(x, y):
    return train(tf.constant(x), tf.constant(y))


job.measure(step, version=f"{tnt_version}, TensorFlow {tf.__version__}")
os._exit(0)
