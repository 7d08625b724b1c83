"""JAX: one process a rank, gradients averaged by psum (gloo), optax.sgd."""

import gzip
import os
from contextlib import contextmanager
from functools import partial

from functions import apply
from protocol import Job

job = Job()
# XLA has as many threads as cores on which this process may run. Its algebraic simplification
# exchanges map and filter where the filter is larger, as in VGG-11's last layers, and has only a
# plain loop of 1 Gflop/s for the result: a step of VGG-11 took 5 times as long with it.
os.environ["XLA_FLAGS"] = "--xla_disable_hlo_passes=algsimp"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as Spec  # noqa: E402

jax.config.update("jax_platforms", "cpu")
if job.ranks > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"{job.addresses[0]}:{job.port}", job.ranks, job.rank)
mesh = Mesh(np.array(jax.devices()), ("data",))


def convolution(x, _, kernel, stride, w):
    pad = [(kernel // 2, kernel // 2)] * 2
    order = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, (stride, stride), pad, dimension_numbers=order)


def norm(x, gamma, beta):
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * gamma + beta


def pool(x, size):
    size = (1, size, size, 1)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, size, size, "VALID")


FUNCTIONS = {
    "conv": convolution,
    "bn": norm,
    "dense": lambda x, _, w, b: x @ w + b,
    "maxpool": pool,
    "gap": lambda x: x.mean((1, 2)),
    "flatten": lambda x: x.reshape(len(x), -1),
    "relu": jax.nn.relu,
}


def loss_of(weights, x, y):
    logits = apply(FUNCTIONS, job.layers, iter(weights), x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


optimizer = optax.sgd(job.rate, job.momentum)


def update(weights, state, x, y):
    loss, gradients = jax.value_and_grad(loss_of)(weights, x, y)
    gradients = jax.lax.pmean(gradients, "data")
    changes, state = optimizer.update(gradients, state)
    return optax.apply_updates(weights, changes), state, loss[None]


replicated, divided = Spec(), Spec("data")
train = jax.jit(
    jax.shard_map(
        update,
        mesh=mesh,
        in_specs=(replicated, replicated, divided, divided),
        out_specs=(replicated, replicated, divided),
        check_vma=False,
    ),
    donate_argnums=(0, 1),
)


def put(array, spec):
    return jax.make_array_from_process_local_data(NamedSharding(mesh, spec), array)


weights = [put(one, replicated) for one in job.weights]
state = jax.jit(optimizer.init, out_shardings=NamedSharding(mesh, replicated))(weights)


def step(x, y):
    global weights, state
    x, y = put(x, divided), put(y.astype("int32"), divided)
    weights, state, loss = train(weights, state, x, y)
    jax.block_until_ready(weights)
    return loss.addressable_shards[0].data[0]


@contextmanager
def trace(path):
    folder = path.with_suffix("")
    jax.profiler.start_trace(folder)
    yield lambda index: jax.profiler.TraceAnnotation("step")
    jax.profiler.stop_trace()
    (written,) = folder.rglob("*.trace.json.gz")
    path.write_bytes(gzip.decompress(written.read_bytes()))


@partial(jax.shard_map, mesh=mesh, in_specs=(replicated, divided), out_specs=divided)
def outputs(weights, x):
    return apply(FUNCTIONS, job.layers, iter(weights), x)


def predict(x):
    return jax.jit(outputs)(weights, put(x, divided)).addressable_shards[0].data


job.measure(step, None, jax.__version__, trace, predict)
