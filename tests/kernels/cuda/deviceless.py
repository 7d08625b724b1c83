"""What cuDNN itself says about our graphs on an H200 that is not there.

cuDNN plans for a GPU that it is only told the properties of, and where the driver is missing does
with the six functions below until it compiles a kernel. This is a program of its own, so that the
process of the tests keeps its (lack of a) driver: it prints one line of JSON for each question.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from ctypes import c_char
from pathlib import Path
from typing import Any

from pydtnn.kernels.cuda import cudnn_graph, libraries
from pydtnn.kernels.cuda.cudnn import Cudnn, CudnnError
from pydtnn.kernels.cuda.cudnn_graph import (
    DESCRIPTOR,
    OPERATIONS,
    Node,
    Target,
    Type,
    convolution_graph,
    plans,
)
from pydtnn.kernels.cuda.engine import PLAIN, Passing
from tests.kernels.geometries import AWKWARD

H200 = {
    "deviceName": "NVIDIA H200",
    "deviceVer": 900,
    "driverVer": 13000,
    "cudaDeviceId": 0,
    "pciDeviceId": 0,
    "multiProcessorCount": 132,
    "smCountOrigin": 0,
    "maxGridSize": [2147483647, 65535, 65535],
    "maxBlockSize": [1024, 1024, 64],
    "warpSize": 32,
    "regsPerBlock": 65536,
    "maxRegistersPerSM": 65536,
    "maxSharedMemoryPerBlock": 49152,
    "maxSharedMemoryPerBlockOptin": 232448,
    "oversizedSharedMemoryPerBlock": 0,
    "reservedSharedMemoryPerBlock": 1024,
    "maxCtasPerSM": 32,
    "maxThreadsPerBlock": 1024,
    "maxThreadsPerSM": 2048,
    "isTccDriver": 0,
    "supportCoopLaunch": 1,
    "smClockRateKHz": 1980000,
    "memClockRateKHz": 3201000,
    "memoryBusWidth": 6144,
    "l2CacheSize": 62914560,
    "totalGlobalMem": 150_000_000_000,
}
NO_DRIVER = """
int cuGetErrorString(int e, const char **text) { *text = "no driver"; return 0; }
int cuModuleGetFunction() { return 999; }
int cuModuleLoadData() { return 999; }
int cuModuleUnload() { return 999; }
int cuTensorMapEncodeIm2col() { return 999; }
int cuTensorMapEncodeTiled() { return 999; }
"""


def missing_driver(folder: Path) -> None:
    """Load a driver that can do nothing, where there is none."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        (folder / "driver.c").write_text(NO_DRIVER)
        library = folder / "libcuda.so.1"
        link = ["-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", str(library)]
        subprocess.run(["g++", "-xc", *link, str(folder / "driver.c")], check=True)
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def target(cudnn: Cudnn) -> Target:
    """Plan for the H200."""
    cudnn_graph.KINDS["DEVICEPROP"] = 38
    for name, number in {"ENGINEHEUR": 204, "EXECUTION_PLAN": 407}.items():
        cudnn_graph.ATTRIBUTES[f"{name}_DEVICEPROP"] = (number, DESCRIPTOR)
    cudnn_graph.ATTRIBUTES["DEVICEPROP_JSON_REPRESENTATION"] = (2702, Type(24, c_char))
    properties = json.dumps(H200).encode() + b"\0"
    gpu = Node(cudnn, "DEVICEPROP", {"DEVICEPROP_JSON_REPRESENTATION": properties})
    return Target({}, {"ENGINEHEUR_DEVICEPROP": gpu}, {"EXECUTION_PLAN_DEVICEPROP": gpu})


def questions() -> list[dict[str, Any]]:
    """Every direction of every awkward geometry; for one of them what is done in passing.

    Where cuDNN has to compile a kernel, for 16 bits with biases, it takes seconds and a driver.
    """
    asked: list[dict[str, Any]] = []
    for case, (batch, _) in AWKWARD.items():
        for dtype, tf32 in (("float32", True), ("float32", False), ("bfloat16", True)):
            kind = {"case": case, "dtype": dtype, "tf32": tf32}
            directions = OPERATIONS if batch else ()
            asked += [{**kind, "direction": direction} for direction in directions]
            asked += [
                {**kind, "direction": direction, "accumulate": True}
                for direction in directions
                if direction != "forward"
            ]
    kind = {"case": "16 filters", "direction": "forward", "tf32": True}
    bias = [{**kind, "dtype": "float32", "passing": (True, relu, False)} for relu in (False, True)]
    return asked + bias + [{**kind, "dtype": "float16", "passing": (False, False, True)}]


def answer(
    cudnn: Cudnn,
    gpu: Target,
    *,
    case: str,
    dtype: str,
    tf32: bool,
    direction: str,
    accumulate: bool = False,
    passing: tuple[bool, bool, bool] = PLAIN,
) -> dict[str, Any]:
    """Make the plans: how much memory they need, or what is wrong with the graph."""
    batch, geometry = AWKWARD[case]
    try:
        graph = convolution_graph(
            *(cudnn, gpu, direction, geometry, batch, dtype),
            accumulate=accumulate,
            passing=Passing(*passing),
        )
        found = plans(cudnn, gpu, graph, 4, tensor_cores=tf32)
    except CudnnError as error:
        return {"error": str(error), "unsupported": error.unsupported}
    return {"workspaces": [plan.workspace for plan in found]}


def main() -> None:
    missing_driver(Path(sys.argv[1]))
    cudnn = Cudnn(libraries.load("cudnn"))
    gpu = target(cudnn)
    for question in questions():
        print(json.dumps({**question, **answer(cudnn, gpu, **question)}), flush=True)


if __name__ == "__main__":
    main()
