"""Kernels in children of `fork`, which inherit memory and locks but no threads."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")

LIMIT = 300  # s; a child that waits for threads or locks waits without end

TWO_THREADS = """
import os, sys
import numpy as np
from pydtnn.kernels import create_backend
from pydtnn.kernels.geometry import ConvGeometry

def work(backend):
    rng = np.random.default_rng(0)
    g = ConvGeometry((16, 16), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 16, 16)
    x, w = rng.normal(size=(8, 16, 16, 16)), rng.normal(size=g.weight_shape)
    y, dx, dw = np.empty_like(x), np.empty_like(x), np.empty_like(w)
    backend.conv.forward(x, w, None, g, out=y)
    backend.conv.backward(x, y, w, g, dx=dx, dw=dw)
    backend.elementwise.forward("relu", dx, out=dx)
    a, b = rng.normal(size=(256, 256)), rng.normal(size=(256, 256))
    backend.linear.forward(a, b, None, out=a.copy())
    return y.tobytes() + dx.tobytes() + dw.tobytes()

child = os.fork()
if child == 0:  # before its parent has used threads
    os._exit(0 if create_backend("cpu", threads=2).conv.threads == 2 else 4)
_, status = os.waitpid(child, 0)
if status:
    sys.exit(os.waitstatus_to_exitcode(status))
backend = create_backend("cpu", threads=2, tuning="fixed")
expected = work(backend)
for _ in range(3):
    child = os.fork()
    if child == 0:
        alone = work(backend) == expected and work(create_backend("cpu", threads=2)) is not None
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(0 if work(backend) == expected else 3)
        _, status = os.waitpid(grandchild, 0)
        os._exit(os.waitstatus_to_exitcode(status) if alone else 2)
    _, status = os.waitpid(child, 0)
    if status:
        sys.exit(os.waitstatus_to_exitcode(status))
    assert work(backend) == expected, "the parent"
"""

ALLOCATING = """
import os, sys, threading, warnings
import numpy as np
from pydtnn.kernels import create_backend
from pydtnn.kernels.cpu import MemoryPool

warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
backend = create_backend("cpu", threads=1)
pool = MemoryPool()
stop = False

def allocate(seed):
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(32, 64))
    out = np.empty((32, 64))
    while not stop:
        pool.empty((int(rng.integers(70_000, 200_000)),), "uint8")
        MemoryPool().empty((100_000,), "uint8")
        backend.linear.forward(a, np.eye(64), None, out=out)

def work():
    arrays = [pool.zeros((100_000,), "uint8") for _ in range(3)]
    a = np.ones((32, 64))
    backend.linear.forward(a, np.eye(64), None, out=np.empty((32, 64)))
    return not any(array.any() for array in arrays)

threads = [threading.Thread(target=allocate, args=(i,)) for i in range(3)]
for thread in threads:
    thread.start()
failed = 0
try:
    for _ in range(FORKS):
        child = os.fork()
        if child == 0:
            os._exit(0 if work() else 2)
        _, status = os.waitpid(child, 0)
        failed += status != 0
finally:
    stop = True
    for thread in threads:
        thread.join()
sys.exit(failed)
"""


def run(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT)


def test_a_child_has_the_threads_that_its_parent_had_not_used_and_computes_the_same():
    run(TWO_THREADS)


@pytest.mark.long
def test_no_child_inherits_a_locked_pool_from_a_parent_whose_threads_allocate():
    run(ALLOCATING.replace("FORKS", "500"))
