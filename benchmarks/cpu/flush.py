"""Cold caches: a C function that drops the cache lines of an array from every level."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np

CODE = """
#include <stddef.h>
void flush(const char *start, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) {
#if defined(__x86_64__)
        __builtin_ia32_clflush(start + i);
#elif defined(__aarch64__)
        __asm__ volatile("dc civac, %0" : : "r"(start + i) : "memory");
#else
#error "this processor has no known instruction that flushes a cache line"
#endif
    }
    __sync_synchronize();
}
"""


class Flush:
    """Writes arrays back to memory and forgets them: the next reader finds no line in cache."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder) / "flush.c", Path(folder) / "flush.so"
            source.write_text(CODE)
            compiler = os.environ.get("CC", "cc").split()
            command = [*compiler, "-O2", "-fPIC", "-shared", str(source), "-o", str(library)]
            subprocess.run(command, check=True)
            self.function = ctypes.CDLL(str(library)).flush

    def __call__(self, *arrays: np.ndarray) -> None:
        for array in arrays:
            self.function(ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes))
