"""Peak of multiply-adds of one core, measured: what the kernels' rates are fractions of."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
import time
from pathlib import Path

CODE = """
#include "simd.h"
void chains(long n, real *out) {
    vec b = vset(out[0]), c = vset(out[1]);
    vec s0 = c, s1 = c + 1, s2 = c + 2, s3 = c + 3, s4 = c + 4, s5 = c + 5, s6 = c + 6, s7 = c + 7;
    vec s8 = c + 8, s9 = c + 9;
    for (long i = 0; i < n; i++) {
        s0 = s0 * b + c, s1 = s1 * b + c, s2 = s2 * b + c, s3 = s3 * b + c, s4 = s4 * b + c;
        s5 = s5 * b + c, s6 = s6 * b + c, s7 = s7 * b + c, s8 = s8 * b + c, s9 = s9 * b + c;
    }
    out[2] = vsum(s0 + s1 + s2 + s3 + s4 + s5 + s6 + s7 + s8 + s9);
}
"""
CHAINS = 10  # a latency of 4 cycles, two multiply-adds a cycle, and two to spare
WIDTH = {"generic": 16, "avx2": 32, "avx512": 64}
FLAGS = {
    "generic": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512": ["-mavx512f", "-mfma", "-mprefer-vector-width=512"],
}


class Peak:
    """A loop of independent multiply-adds on registers, for one instruction set and real type."""

    def __init__(self, isa: str, dtype: str = "float32") -> None:
        self.real = {"float32": ctypes.c_float, "float64": ctypes.c_double}[dtype]
        isa = "avx512" if isa == "amx" else isa.removesuffix("_bf16")  # the same in these types
        self.lanes = WIDTH[isa] // ctypes.sizeof(self.real)
        sources = Path(__file__).parents[2] / "pydtnn/kernels/cpu/src"
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder) / "peak.c", Path(folder) / "peak.so"
            source.write_text(CODE)
            subprocess.run(
                [
                    *os.environ.get("CC", "cc").split(),
                    *("-O3", "-std=gnu11", "-ffp-contract=fast", "-fPIC", "-shared"),
                    *FLAGS[isa],
                    f"-I{sources}",
                    f"-DVECTOR_BYTES={WIDTH[isa]}",
                    f"-DREAL_FLOAT={int(dtype == 'float32')}",
                    "-DSUFFIX=peak",
                    *(str(source), "-o", str(library)),
                ],
                check=True,
            )
            self.chains = ctypes.CDLL(str(library)).chains

    def measure(self, iterations: int = 200_000) -> float:
        """Flop/s of one run of about a millisecond."""
        operands = (self.real * 3)(1.0, 1e-9, 0.0)
        start = time.perf_counter()
        self.chains(ctypes.c_long(iterations), operands)
        return 2 * CHAINS * self.lanes * iterations / (time.perf_counter() - start)
