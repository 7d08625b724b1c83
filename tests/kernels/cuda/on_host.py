"""The convolutions of the cuda backend on NumPy: the same code without a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from pydtnn.kernels import ConvGeometry
from pydtnn.kernels.choices import Choices
from pydtnn.kernels.cuda.backend import CudaBackend
from pydtnn.kernels.cuda.conv import Conv, Tools
from pydtnn.kernels.cuda.cublas import NO, layout
from pydtnn.kernels.cuda.cudnn_conv import Algorithm, CudnnConvolutions, even
from pydtnn.kernels.cuda.linear import Linear
from pydtnn.kernels.cuda.pool import Pool
from pydtnn.kernels.cuda.rows import Rows
from pydtnn.kernels.reference import Conv as Reference
from pydtnn.kernels.reference import Elementwise, Fused, Norm
from tests.kernels.cuda.emulator import emulated_cupy, families, on_device

OTHERS = ("elementwise", "fused", "loss", "norm", "random", "update")
WORKSPACE = 64  # bytes


def multiply(a: np.ndarray, b: np.ndarray, out: np.ndarray, accumulate: bool = False) -> None:
    """What `Products` computes, of matrices that can be described to cuBLAS."""
    if not out.size:
        return
    layout(a)
    layout(b)
    assert layout(out)[0] == NO
    product = a @ b
    out[...] = out + product if accumulate else product


class Plan:
    """Stands in for a plan of cuDNN; the reference convolves, without what cuDNN cannot pad."""

    def __init__(self, direction: str, geometry: ConvGeometry) -> None:
        self.direction, self.geometry = direction, geometry
        names = enumerate(("implicit gemm", "winograd"))
        self.algorithms = {name: Algorithm(i, 0, WORKSPACE) for i, name in names}

    def run(
        self,
        algorithm: Algorithm,
        first: np.ndarray,
        second: np.ndarray,
        out: np.ndarray,
        accumulate: bool,
        workspace: np.ndarray,
    ) -> None:
        assert workspace.nbytes == algorithm.workspace
        before = out.copy() if accumulate else 0
        conv, g = Reference(np), self.geometry
        if self.direction == "forward":
            conv.forward(first, second, None, g, out=out)
        elif self.direction == "backward_data":
            conv.backward_data(second, first, g, out=out)
        else:
            conv.backward_filter(first, second, g, out=out)
        out += before


class Emulated(CudnnConvolutions):
    """The engine of cuDNN over plans that stand in for cuDNN's."""

    def __init__(self) -> None:
        self._cupy, self._plans = np, {}

    def _make_plan(self, direction: str, geometry: ConvGeometry, batch: int, dtype: str) -> Any:
        assert geometry == even(geometry)
        return Plan(direction, geometry)

    def _to_current_stream(self) -> None:
        pass


def conv(choices: Choices | None = None) -> Conv:
    """The family `conv` of the cuda backend, with both engines."""
    tools = Tools(lambda: None, Fused(np), Norm(np), Elementwise(np))
    return Conv(np, (Emulated(), Rows(np, multiply)), choices or Choices("direct"), tools)


def backend(folder: Path) -> CudaBackend:
    """The cuda backend with all of its own kernels emulated; they are compiled into `folder`."""
    made, xp = families(folder), emulated_cupy()
    xp.asnumpy, xp.asarray = np.asarray, lambda *a, **k: on_device(np.asarray(*a, **k))
    xp.get_default_memory_pool = lambda: SimpleNamespace(free_all_blocks=lambda: None)
    choices = Choices("direct")
    tools = Tools(lambda: None, made.fused, made.norm, made.elementwise)
    return CudaBackend(
        name="cuda",
        xp=xp,
        threads=1,
        isa="sm_90",
        choices=choices,
        keeps_values=True,
        conv=Conv(xp, (Emulated(), Rows(xp, multiply)), choices, tools),
        pool=Pool(xp, made.device),
        linear=Linear(xp, made.device, multiply),
        **{name: vars(made)[name] for name in OTHERS},
    )
