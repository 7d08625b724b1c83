"""Our CUDA kernels under a detector of races; and the detector under kernels that are wrong.

What it sees of a kernel does not depend on the numbers, and on the element type only where threads
leave their sums in floats; so all kernels are watched in one type, and one that sums in another.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pydtnn.kernels.cuda import pool
from pydtnn.kernels.cuda.module import elements, source_names
from pydtnn.kernels.dtypes import DTYPES
from tests.kernels.every_kernel import IN_PLACE_ON_GPU, MAKERS, Case, cases, in_place
from tests.simulated import kernels
from tests.simulated.host import HostModule, on_device
from tests.simulated.watched import Watched, kernel_names, sites

pytestmark = pytest.mark.skipif(kernels.COMPILER is None, reason="there is no g++")

WRONG = str(Path(kernels.__file__).parent / "wrong")
FLAT = ("forward", "backward", "add", "binary_cross_entropy", "squared_error", "absolute_error")
"""Kernels beside those of `update` whose vectors depend on addresses alone."""

OURS = [name for name in MAKERS if not name.startswith("linear")] + ["linear.backward_bias"]
"""Kernels that are not those of a library of NVIDIA."""

Run = Callable[[Watched], None]


def run(watched: Watched, case: Case, dtype: str = "float32", *same: str) -> None:
    """Call a kernel, with one array under two names where these are given."""
    arrays = {n: watched.array(a, a.dtype.name) for n, a in case.typed(dtype).items()}
    arrays |= {name: arrays[same[-1]] for name in same}
    case.run(watched.families, arrays)
    watched.forget()


def of_kernel(kernel: str, watched: Watched, dtype: str = "float32") -> None:
    """Run the cases of ``family.kernel``."""
    for case in cases(kernel, np.random.default_rng(1)):
        run(watched, case, dtype)


def not_aligned(watched: Watched) -> None:
    """Arrays from which no vectors can be loaded."""
    watched.shift = 1
    for kernel in OURS:
        family, name = kernel.split(".")
        if family == "update" or name in FLAT:
            of_kernel(kernel, watched)
    watched.shift = 0


def of_other_types(watched: Watched) -> None:
    """What is converted to float32, and its bias."""
    draw = partial(np.random.default_rng(1).uniform, 1, 2)
    for watched.shift in (0, 1):
        for dtype in DTYPES:
            out = watched.empty(5003, "float32")
            watched.families.elementwise.convert(watched.array(draw(5003), dtype), out=out)
    watched.shift = 0
    for columns in (3000, 3001):
        x, w = watched.array(draw((3, 2)), "float32"), watched.array(draw((columns, 2)), "float32")
        bias, y = (watched.array(draw(size), "float32") for size in (columns, (3, columns)))
        watched.families.linear.forward(x, w, bias, out=y)


def of_images(watched: Watched) -> None:
    """With changes of more pixels than integers of 32 bits can add up."""
    changes = [("crop", 2**30), ("cutout", 2**31 - 1), ("flip", 0), ("crop", 2**30)]
    rng = np.random.default_rng(1)
    for channels in (1, 2, 3, 4):
        for watched.shift, size in ((0, 9), (0, 40), (1, 8)):
            shape = (3, size, size, channels)
            x = watched.array(rng.integers(0, 256, shape), "uint8")
            words = watched.array(rng.integers(0, 2**32, (3, 16)), "uint32")
            words[1], words[0] = 2**32 - 1, 0
            given = [np.arange(channels)] * 3
            out = watched.empty(shape, "float32")
            watched.families.images.prepare(x, words, changes, *given, out=out)
    watched.shift = 0


def outputs_that_are_inputs(watched: Watched) -> None:
    for kernel in IN_PLACE_ON_GPU:
        for case, *names in in_place(kernel, np.random.default_rng(1)):
            run(watched, case, "float32", *names)


def of_pooling(watched: Watched) -> None:
    """With several channels for a thread, and large windows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "MIN_BUSY_THREADS", 0)
        for kernel in OURS:
            if kernel.startswith("pool"):
                of_kernel(kernel, watched)
        for name in ("pool.max_forward", "pool.max_backward"):
            for case in cases(name, np.random.default_rng(1)):
                arrays = {**case.arrays, "i index": case.arrays["b index"]}
                family, given = watched.families, {}
                for key, array in arrays.items():
                    given[key] = watched.array(array, "int32" if key == "i index" else "float32")
                case.run(family, {**given, "b index": given["i index"]})


@pytest.fixture(scope="module")
def all_kernels() -> Watched:
    """Every kernel, watched."""
    pairs = [(name, "float32" if len(elements(name)) > 1 else "float64") for name in source_names()]
    pairs += [("linear", "bfloat16"), (WRONG, "float32")]
    kernels.detector()
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # they wait for compilers
        list(threads.map(lambda pair: kernels.build(*pair, watched=True), pairs))
    watched = Watched()
    for kernel in OURS:
        of_kernel(kernel, watched)
    of_kernel("linear.backward_bias", watched, "bfloat16")
    for more in (not_aligned, of_other_types, of_images, outputs_that_are_inputs, of_pooling):
        more(watched)
    return watched


def test_no_kernel_has_a_race_or_uses_memory_that_is_not_its_own(all_kernels):
    assert not all_kernels.findings


def test_every_kernel_is_watched(all_kernels):
    missing = set()
    for name in source_names():
        element = "float32" if len(elements(name)) > 1 else "float64"
        library = kernels.build(name, element, watched=True)
        missing |= kernel_names(library) - all_kernels.launched
    assert not missing


RUNS: dict[str, Run] = {
    "columns.cuh": partial(of_kernel, "norm.statistics"),
    "deferred.cuh": partial(of_kernel, "fused.evaluate"),
    "images.cu": of_images,
    "team.cuh": partial(of_kernel, "norm.group_forward"),
    "update.cu": partial(of_kernel, "update.sgd"),
}


@pytest.mark.parametrize("site", sites(), ids=str)
def test_no_barrier_or_fence_can_be_left_out(all_kernels, site):
    watched = Watched()
    RUNS[site.file](watched)
    assert not watched.findings
    watched.without = site
    RUNS[site.file](watched)
    assert {finding.kind for finding in watched.findings} == {"race"}


@pytest.fixture
def call(all_kernels: Watched) -> Callable[..., Watched]:
    """Call a kernel of `wrong.cu`; return who has watched it."""

    def call(name: str, threads: int = 64) -> Watched:
        watched = Watched()
        x = watched.array(np.ones(128), "float32")
        out, arrived = watched.array(np.ones(64), "float32"), watched.families.device.arrived
        others = {
            "right": (x, out, arrived),
            "right_too": (x, out, arrived),
            "race_of_a_late_fence": (x, out, arrived),
            "unwritten": (x, watched.empty(128, "float32")),
            "counters": (arrived,),
        }
        kernel = watched.module(WRONG).kernel(name, "float32")
        kernel((2,), (threads,), others.get(name, (x, 128)))
        return watched

    return call


@pytest.mark.parametrize("name", ["right", "right_too"])
def test_a_kernel_without_a_mistake_is_let_pass(call, name):
    assert not call(name).findings


def mistakes() -> list[str]:
    text = Path(f"{WRONG}.cu").read_text("utf-8")
    return [name for name in re.findall(r"KERNEL\((\w+)_float32", text) if "right" not in name]


@pytest.mark.parametrize("name", mistakes())
def test_a_mistake_is_found(call, name):
    found = call(name, threads=48 if name == "diverged_lanes" else 64).findings
    assert {finding.kind for finding in found} == {name.split("_")[0]}
    if found[0].kind != "counters":
        assert "wrong.cu:" in found[0].what


def test_threads_that_never_come_are_no_endless_loop():
    """Nor without the detector."""
    x = on_device(np.ones(128, "float32"))
    with pytest.raises(AssertionError, match="stuck_float32: 32 threads wait"):
        HostModule(WRONG).kernel("stuck", "float32")((2,), (64,), (x, 128))
    HostModule(WRONG).kernel("race", "float32")((2,), (64,), (x, 128))  # the next one runs
