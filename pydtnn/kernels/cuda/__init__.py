"""The ``cuda`` backend: the reference families on a GPU, by CuPy, cuDNN, cuBLAS and our kernels."""

from pydtnn.kernels.cuda.backend import CudaBackend, create_cuda_backend
from pydtnn.kernels.cuda.libraries import Unavailable

__all__ = ["CudaBackend", "Unavailable", "create_cuda_backend"]
