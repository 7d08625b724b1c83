"""Kernels run on the small stacks that some systems and settings give to threads."""

import os
import subprocess
import sys

KERNELS = """
import numpy as np
from pydtnn.kernels import create_backend
from pydtnn.kernels.cpu import available
from pydtnn.kernels.geometry import ConvGeometry

rng = np.random.default_rng(0)
for isa in available():
    for dtype in (np.float32, np.float64):
        backend = create_backend("cpu", threads=3, isa=isa, tuning="direct")
        for n, i, o in ((96, 1024, 512), (70, 300, 270)):
            x, w = rng.normal(size=(n, i)).astype(dtype), rng.normal(size=(o, i)).astype(dtype)
            y = np.empty((n, o), dtype)
            backend.linear.forward(x, w, None, out=y)
            backend.linear.backward_data(y, w, out=np.empty_like(x))
            backend.linear.backward_filter(x, y, out=np.empty_like(w))
        for stride, groups in ((1, 1), (2, 1), (1, 48)):
            strides, padding = (stride, stride), ((1, 1), (1, 1))
            g = ConvGeometry((12, 12), (3, 3), strides, padding, (1, 1), 48, 48, groups)
            x = rng.normal(size=(8, 12, 12, 48)).astype(dtype)
            w = rng.normal(size=g.weight_shape).astype(dtype)
            y = np.empty((8, *g.output, 48), dtype)
            names = ("direct", "winograd4", "winograd2") if stride == groups == 1 else ("direct",)
            for name in names:
                backend.conv.forward(x, w, None, g, out=y, algorithm=name)
                backend.conv.backward(
                    x, y, w, g, dx=np.empty_like(x), dw=np.empty_like(w), algorithm=name
                )
        x = rng.normal(size=(40, 36, 1500)).astype(dtype)
        backend.norm.statistics(x, out=np.empty(1 + 2 * 1500))
        ones, dgamma, dbeta = np.ones((3, 1500), dtype)
        y, dx, (mean, inv_std) = np.empty_like(x), np.empty_like(x), np.empty((2, 40, 3))
        backend.norm.group_forward(x, ones, ones, 3, 1e-5, out=y, mean=mean, inv_std=inv_std)
        given = x, y, ones, 3, mean, inv_std
        backend.norm.group_backward(*given, out=dx, dgamma=dgamma, dbeta=dbeta)
print("done")
"""


def test_kernels_run_in_threads_with_64_kib_of_stack():
    # OpenMP's own limit holds for all threads but the first
    environment = {**os.environ, "OMP_STACKSIZE": "64k"}
    done = subprocess.run(
        [sys.executable, "-c", KERNELS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
