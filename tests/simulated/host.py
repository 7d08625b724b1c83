"""Our kernels on NumPy's own arrays, carried out at once: to hold them to the reference.

The reference and our kernels take the same arrays then. What is asked of arrays of a device beyond
their values (that nobody mixes them with the host's, or waits for them) is not tested in this way.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np

from pydtnn.kernels import ConvGeometry, reference
from pydtnn.kernels.autotuner import Autotuner
from pydtnn.kernels.cuda.conv import CudaConv, Tools
from pydtnn.kernels.cuda.cudnn_conv import Algorithm, CudnnConvolutions, even
from pydtnn.kernels.cuda.elementwise import CudaElementwise
from pydtnn.kernels.cuda.fused import CudaFused
from pydtnn.kernels.cuda.linear import CudaLinear
from pydtnn.kernels.cuda.loss import CudaLoss
from pydtnn.kernels.cuda.memory import Scratch
from pydtnn.kernels.cuda.module import DeviceState
from pydtnn.kernels.cuda.norm import CudaNorm
from pydtnn.kernels.cuda.random import CudaRandom
from pydtnn.kernels.cuda.rows import Rows
from pydtnn.kernels.cuda.update import CudaUpdate
from tests.simulated import kernels, libraries
from tests.simulated.libraries import multiply


class HostArray(np.ndarray):
    """A NumPy array that tells its address as CuPy's do."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


def on_device(array: Any) -> Any:
    return np.asarray(array).view(HostArray)


class HostModule(kernels.Module):
    """The kernels of a source, which take any array of NumPy."""

    def __init__(self, name: str) -> None:
        super().__init__(name, lambda call, blocks: call())

    def kernel(self, name: str, element: str) -> Callable[..., None]:
        launch = super().kernel(name, element)

        def launch_on_host(grid: Any, block: Any, arguments: tuple[Any, ...]) -> None:
            given = [on_device(a) if isinstance(a, np.ndarray) else a for a in arguments]
            launch(grid, block, given)

        return launch_on_host


class HostDevice(DeviceState):
    """What families share, on the host."""

    def module(self, source: str) -> Any:
        return HostModule(source)


def emulated_cupy() -> Any:
    """What our families use of CuPy."""

    def empty(shape: Any, dtype: Any = "float64") -> Any:
        array = np.empty(shape, dtype)
        array.view("uint8" if array.ndim else array.dtype).fill(255 if array.ndim else 0)  # NaN
        return on_device(array)

    def contiguous(array: Any, dtype: Any = None) -> Any:
        return on_device(np.require(array, dtype, ["C", "A"]))

    def zeros(shape: Any, dtype: Any) -> Any:
        return on_device(np.zeros(shape, dtype))

    names = {name: getattr(np, name) for name in dir(np) if not name.startswith("_")}
    return SimpleNamespace(
        **{**names, "empty": empty, "ascontiguousarray": contiguous, "zeros": zeros}
    )


def families() -> Any:
    """Every family with kernels of our own, emulated."""
    xp = emulated_cupy()
    device = HostDevice(xp)
    made = {
        family.__name__.removeprefix("Cuda").lower(): family(xp, device)
        for family in (CudaElementwise, CudaFused, CudaLoss, CudaNorm, CudaRandom, CudaUpdate)
    }
    return SimpleNamespace(**made, linear=CudaLinear(xp, device, multiply), device=device)


class HostPlan:
    """Stands for a plan of cuDNN."""

    def __init__(self, direction: str, geometry: ConvGeometry) -> None:
        self._direction, self._geometry = direction, geometry
        names = enumerate(("implicit gemm", "winograd"))
        self.algorithms = {name: Algorithm(i, 0, libraries.WORKSPACE) for i, name in names}

    def run(
        self, algorithm: Algorithm, first: Any, second: Any, out: Any, add: bool, workspace: Any
    ) -> None:
        assert workspace.nbytes >= algorithm.workspace
        libraries.convolve(self._direction, self._geometry, first, second, out, accumulate=add)


class HostConvolutions(CudnnConvolutions):
    """cuDNN's older interface, which does float64, too."""

    def _make_plan(self, direction: str, geometry: ConvGeometry, batch: int, dtype: str) -> Any:
        assert geometry == even(geometry)
        return HostPlan(direction, geometry)


def conv(autotuner: Autotuner | None = None) -> CudaConv:
    """Make the family `conv` with two engines, around the families of the reference."""
    stream, handle = SimpleNamespace(ptr=0), SimpleNamespace(to_current_stream=lambda: None)
    cuda: Any = SimpleNamespace(get_current_stream=lambda: stream)
    scratch = Scratch(SimpleNamespace(cuda=cuda, empty=np.empty))
    plain = (
        reference.FusedKernels(np),
        reference.NormKernels(np),
        reference.ElementwiseKernels(np),
    )
    tools = Tools(lambda: nullcontext(lambda name, work: work()), *plain)
    given: Any = (None, np, handle, tools.elementwise, scratch)
    engines = (HostConvolutions(*given, tf32=False), Rows(np, multiply))
    return CudaConv(np, engines, autotuner or Autotuner("direct"), tools)
