"""The checks of `gpu_first.py`: each yields lines that say what it saw, or raises.

They go from what everything needs to what needs everything: so the first that fails is the one to
look at.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common.compute_bound import conv as geometry_of
from benchmarks.common.report import WITH_TORCH
from benchmarks.common.work import CIFAR
from benchmarks.gpu.work import WORK, create_side
from pydtnn.cli.parallel import gpu_facts
from pydtnn.comm.nccl import create_nccl
from pydtnn.comm.serial import Serial
from pydtnn.data import Batch
from pydtnn.kernels import create_backend
from pydtnn.kernels.cuda import libraries
from pydtnn.kernels.cuda.engine import Refused
from pydtnn.kernels.cuda.graph import WARM_UP, Graphs
from pydtnn.kernels.cuda.module import compile_with_nvrtc, find_nvcc
from pydtnn.kernels.dtypes import DTYPES, arithmetic
from pydtnn.model import Model
from pydtnn.models import create_net
from pydtnn.optimizers import SGD
from pydtnn.training.trainer import Trainer
from pydtnn.utils.device import Device

ERROR = {"float64": 1e-10, "float32": 2e-3, "float16": 5e-3, "bfloat16": 3e-2}
"""Largest error of products, in norm; float32 is rounded to TF32."""

SUMS = 1e-6
"""That of statistics, which are added up in float64."""

COPIED, COPIES = 1 << 28, 50
"""Bytes of the array that is copied, and how often."""

TURNS = (12, 100)
"""Steps to warm up, and that are timed."""


class Given(NamedTuple):
    """What is trained, the size of its batch, and what is timed of `gpu.work.WORK`."""

    model: str
    size: int
    work: str


class Wrong(Exception):
    """Something ran, and what came out is not right."""


def random(backend: Any, shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    """Normal numbers on the device."""
    values = np.random.default_rng(seed).standard_normal(shape)
    return backend.asarray(values.astype(np.dtype(dtype)))


def compare(what: str, backend: Any, got: Any, expected: Any, most: float) -> float:
    """Return the error in norm; raise `Wrong` if it is too large."""
    seen, right = (np.asarray(backend.to_numpy(a), "float64") for a in (got, expected))
    error = float(np.linalg.norm(seen - right) / np.linalg.norm(right))
    if not error <= most:
        raise Wrong(f"{what}: error {error:.1e}, {most:.0e} at most")
    return error


def each(names: Sequence[str], look: Callable[[str], Iterator[str]]) -> Iterator[str]:
    """Look into one after the other: what fails leaves the others, and is told at the end."""
    failed = []
    for name in names:
        try:
            yield from look(name)
        except Exception as error:  # of whatever kind
            traceback.print_exc()
            failed.append(f"{name} ({type(error).__name__}: {error})")
    if failed:
        raise Wrong("; ".join(failed))


def gpu(given: Given) -> Iterator[str]:
    """Name the GPU, its memory, the driver, and the libraries with their places."""
    cupy = libraries.usable_cupy()
    runtime = cupy.cuda.runtime
    free, total = runtime.memGetInfo()
    yield ", ".join(f"{name} {value}" for name, value in gpu_facts(cupy).items())
    yield f"driver for CUDA {runtime.driverGetVersion()}, {free >> 20} of {total >> 20} MB free"
    for name in libraries.WANTED:
        try:
            yield f"{(found := libraries.load(name))} in {found.path}"
        except libraries.Unavailable as error:
            yield str(error)


def compilers(given: Given) -> Iterator[str]:
    """Compile a kernel of CuPy's, and one of ours, with NVRTC; name nvcc."""
    cupy = libraries.usable_cupy()
    libraries.load("nvrtc")  # as the backend does, before CuPy needs it
    if (cupy.arange(3) + 1).get().tolist() != [1, 2, 3]:
        raise Wrong("CuPy adds wrongly")
    start = time.perf_counter()
    compile_with_nvrtc("norm", f"sm_{cupy.cuda.Device().compute_capability}", "float32")
    yield f"NVRTC compiles norm.cu in {time.perf_counter() - start:.1f} s; nvcc: {find_nvcc()}"


def kernels(given: Given) -> Iterator[str]:
    """Launch a map, a sum over blocks and a product in each dtype."""
    backend = create_backend("cuda")

    def look(dtype: str) -> Iterator[str]:
        x, y = (random(backend, (1000, 96), dtype, seed) for seed in (1, 2))
        host_x, host_y = (backend.to_numpy(a).astype("float64") for a in (x, y))
        total, product = backend.empty(x.shape, dtype), backend.empty((1000, 1000), dtype)
        sums = backend.zeros((1 + 2 * 96,), "float64")
        backend.elementwise.add(x, y, out=total)
        backend.norm.statistics(x, out=sums)
        backend.linear.forward(x, y, None, out=product)
        expected = np.concatenate([[1000], host_x.sum(axis=0), (host_x**2).sum(axis=0)])
        compare("map", backend, total, backend.asarray(host_x + host_y), ERROR[dtype])
        compare("statistics", backend, sums, backend.asarray(expected), SUMS)
        right = backend.asarray(host_x @ host_y.T)
        error = compare("product", backend, product, right, ERROR[dtype])
        yield f"{dtype}: map, sums and product are right, the product's error is {error:.0e}"

    yield from each(DTYPES, look)


def convolutions(given: Given) -> Iterator[str]:
    """Run every algorithm that is proposed for a convolution, and compare it with im2row."""
    backend, geometry, batch = create_backend("cuda"), geometry_of(16, 32, 32, 3, padding=1), 8
    conv, wrong = backend.conv, []
    for dtype in ("float32", "bfloat16", "float16"):
        x = random(backend, (batch, *geometry.size, 32), dtype, 1)
        w, dy = random(backend, geometry.weight_shape, dtype, 2), random(backend, x.shape, dtype, 3)
        into = {"forward": dtype, "backward_data": dtype, "backward_filter": arithmetic(dtype)}
        calls: dict[str, Callable[[Any, str], None]] = {
            "forward": lambda out, name, x=x, w=w: conv.forward(
                x, w, None, geometry, out=out, algorithm=name
            ),
            "backward_data": lambda out, name, dy=dy, w=w: conv.backward_data(
                dy, w, geometry, out=out, algorithm=name
            ),
            "backward_filter": lambda out, name, x=x, dy=dy: conv.backward_filter(
                x, dy, geometry, out=out, algorithm=name
            ),
        }
        for direction, call in calls.items():
            shape = geometry.weight_shape if direction == "backward_filter" else x.shape
            expected = backend.zeros(shape, into[direction])
            call(expected, "rows")
            names = list(conv.algorithms(direction, geometry, batch, x.dtype))
            said = []
            for name in names:
                out = backend.zeros(shape, into[direction])
                try:
                    call(out, name)
                    error = compare(name, backend, out, expected, ERROR[dtype])
                    said.append(f"{name} {error:.0e}")
                except Refused as refusal:
                    said.append(f"{name} refused ({refusal})")
                except Exception as problem:  # the others are of interest, too
                    said.append(f"{name} WRONG ({problem})")
                    wrong.append(f"{direction} {dtype} {name}")
            yield f"{direction} {dtype}: {', '.join(said)}"
    if wrong:
        raise Wrong(", ".join(wrong))


def graphs(given: Given) -> Iterator[str]:
    """Capture some work and replay it."""
    backend = create_backend("cuda")
    captured = Graphs(Device(backend.xp), memory=backend.memory.apart)
    x, one = backend.zeros((1000,), "float32"), backend.xp.ones(1000, "float32")

    def work() -> Any:
        backend.elementwise.add(x, one, out=x)
        made = backend.empty(x.shape, x.dtype)  # memory of the graph's own
        backend.elementwise.add(x, x, out=made)
        return made

    for done in range(1, WARM_UP + 4):
        result = captured.run("work", work)
        compare("replay", backend, result, backend.asarray(np.full(1000, 2.0 * done)), 0.0)
    if captured.why_not:
        raise Wrong(captured.why_not)
    yield "work is captured, and its replays are right"


def nccl(given: Given) -> Iterator[str]:
    """Let one rank talk to itself, as it is and in a graph."""
    backend = create_backend("cuda")
    comm = create_nccl(Serial(), backend.xp)
    x = random(backend, (1000,), "float32")
    before, captured = backend.to_numpy(x).copy(), Graphs(Device(backend.xp))
    for _ in range(WARM_UP + 3):
        captured.run("allreduce", lambda: comm.allreduce(x))
        compare("allreduce", backend, x, backend.asarray(before), 0.0)
    if captured.why_not:
        raise Wrong(captured.why_not)
    yield f"NCCL {comm.version}: one rank, captured and replayed"


def steps(given: Given) -> Iterator[str]:
    """Train on one batch in each dtype, until steps have been replayed."""

    def look(dtype: str) -> Iterator[str]:
        backend = create_backend("cuda")
        net = create_net(given.model, 10, CIFAR)
        model = Model(net, CIFAR, backend=backend, dtype=dtype)
        trainer, rng = Trainer(model, SGD(0.02, momentum=0.9)), np.random.default_rng(0)
        x = rng.standard_normal((given.size, *CIFAR)).astype(arithmetic(dtype))
        y = rng.integers(10, size=given.size)
        batch = Batch(x, y, np.arange(given.size), 0, given.size)
        losses = [trainer.train_step(batch).means()["loss"] for _ in range(WARM_UP + 3)]
        yield f"{dtype}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, {trainer.steps.graph}"
        report = backend.autotuner.report().items()
        yield from (f"{dtype}: {what}: {why}" for what, why in report if "refused" in why)
        if losses[-1] >= losses[0] or trainer.steps.graph != "one CUDA graph":
            raise Wrong("the loss does not fall, or steps are not one graph")

    yield from each(DTYPES, look)


def bandwidth(given: Given) -> Iterator[str]:
    """Copy a large array on the device."""
    backend = create_backend("cuda")
    source = backend.zeros((COPIED,), "uint8")
    into = backend.empty(source.shape, "uint8")
    for _ in range(2):  # the second time is the one
        backend.synchronize()
        start = time.perf_counter()
        for _ in range(COPIES):
            backend.xp.copyto(into, source)
        backend.synchronize()
        seconds = time.perf_counter() - start
    yield f"a copy of {COPIED >> 20} MB moves {2 * COPIED * COPIES / seconds / 1e9:.0f} GB/s"


def speed(given: Given) -> Iterator[str]:
    """Time steps of ours, with the first algorithms there are, and of PyTorch's as it is."""

    def look(what: str) -> Iterator[str]:
        seconds, turns = 0.0, [*TURNS, 0]

        def ask(last: float | None) -> int:
            nonlocal seconds
            seconds = last or 0.0
            return turns.pop(0)

        side, dtype = what.split()
        work = create_side(side, "cuda", given.work, dtype)
        work.turns(ask)
        yield (
            f"{given.work} {dtype}, {side}: {1e3 * seconds:.2f} ms a step, "
            f"{WORK[given.work].batch / seconds:.0f} images/s {work.note}".rstrip()
        )

    sides = ("ours", *(("eager",) if WITH_TORCH else ()))
    yield from each(
        [f"{side} {dtype}" for dtype in ("float32", "bfloat16") for side in sides], look
    )


Check = Callable[[Given], Iterator[str]]

CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        *(gpu, compilers, kernels, convolutions, graphs, nccl, steps),
        *(bandwidth, speed),
    )
}
ALONE = ("bandwidth", "speed")
"""Those that measure time."""
