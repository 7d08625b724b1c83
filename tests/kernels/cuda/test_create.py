"""The cuda backend as it is made, on a device that is simulated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import ConvGeometry, report
from pydtnn.kernels.cuda import Unavailable, backend
from pydtnn.kernels.cuda.cublas import CublasError
from pydtnn.kernels.cuda.cudnn import CudnnError
from pydtnn.layers import BatchNorm, Conv2d, Flatten, Linear, ReLU, Sequential
from pydtnn.model import Model
from tests.simulated import simulated_backend

GEOMETRY = ConvGeometry((8, 8), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 4, 8)


@pytest.fixture
def cuda() -> Any:
    return simulated_backend(eager=True, tuning="fixed")


def gradients(cuda: Any) -> Any:
    """A function that carries out all directions, into the same arrays."""
    x, w = cuda.zeros((2, 8, 8, 4), "float16"), cuda.zeros(GEOMETRY.weight_shape, "float16")
    y, dw = cuda.zeros((2, 8, 8, 8), "float16"), cuda.zeros(w.shape, "float32")

    def run() -> None:
        cuda.conv.forward(x, w, None, GEOMETRY, out=y)
        cuda.conv.backward_data(y, w, GEOMETRY, out=x, add=x)
        cuda.conv.backward_filter(x, y, GEOMETRY, out=dw)

    return run


def test_arrays_of_the_host_are_not_brought_to_the_gpu_while_a_step_is_captured(cuda):
    stream = cuda.xp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(RuntimeError, match="cannot be brought to the GPU while a step is"):
            cuda.asarray([1.0, 2.0])
        x = cuda.empty((3,), "float32")
        assert cuda.asarray(x) is x
        stream.end_capture()
    np.testing.assert_array_equal(cuda.to_numpy(cuda.asarray([1.0, 2.0])), [1, 2])


def test_convolutions_take_no_memory_from_the_driver_once_they_have_run(cuda):
    run = gradients(cuda)
    run()
    held, scratch = cuda.memory.held, cuda.memory.scratch.nbytes
    assert scratch > 0
    with cuda.xp.watched() as seen:
        run()
        assert not seen.allocations
        assert not seen.waits
    assert (cuda.memory.held, cuda.memory.scratch.nbytes) == (held, scratch)


def test_flags_are_up_and_the_device_can_be_waited_for(cuda):
    assert [cuda.to_numpy(flag).tolist() for flag in (cuda.go, cuda.alive)] == [[1.0], [1.0]]
    gradients(cuda)()
    cuda.synchronize()
    held = cuda.memory.held
    cuda.trim()
    assert cuda.memory.held <= held


def test_the_report_says_which_algorithms_were_taken_and_why(cuda):
    gradients(cuda)()
    chosen = {what: why for what, why in report(cuda).items() if why == "graph, by rule"}
    assert len(chosen) == 3
    assert all("3x3 4->8 on 8x8 padding 1 float16, batch 2" in what for what in chosen)


@pytest.mark.parametrize(
    ("part", "error"),
    [
        ("Handle", CudnnError("cudnnCreate", 1001, "NOT_INITIALIZED")),
        ("Products", CublasError("cuBLAS: cublasCreate_v2 failed: NOT_INITIALIZED.")),
    ],
)
def test_a_gpu_that_a_library_cannot_use_is_refused_in_one_sentence(monkeypatch, part, error):
    def fail(*given: Any, **options: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(f"tests.simulated.backend.{part}", fail)
        with pytest.raises(Unavailable, match="backend cuda: simulated device cannot be used: cu"):
            simulated_backend()
    assert backend.CudaBackend  # as it was


def test_a_summary_forecasts_the_memory_of_the_gpu(cuda):
    body = [Conv2d(8, 3, bias=False), BatchNorm(), ReLU(), Flatten(), Linear(3)]
    model = Model(Sequential(*body), (8, 8, 3), backend=cuda)
    lines = dict(line.split("  ", 1) for line in model.summary(4).splitlines()[-6:])
    assert "of it scratch memory of kernels" in lines["GPU"]
    assert "B at the peak of a step" in lines["memory pool"]
    assert "process" not in lines
