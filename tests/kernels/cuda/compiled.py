"""Our CUDA sources compiled by nvcc, once: what the compiler said of each kernel is kept.

A source costs seconds; what comes of it lies in the user's cache under a digest of all that went
into it, so that only what has changed is compiled again.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pydtnn.kernels.cuda.module import SOURCES, find_nvcc, options, source_files
from pydtnn.utils.files import user_cache, write_file

OPTIONS = ("-Werror", "all-warnings", "-Xptxas", "-v", "-cubin", "--keep")
ENTRY = re.compile(r"\.entry (\w+)\(.*?^\}", re.MULTILINE | re.DOTALL)
ACCESS = re.compile(r"\b(ld|st)\.(?:volatile\.)?global[.\w]*?(?:\.v([24]))?\.[bfsu](8|16|32|64)\b")
NAME = re.compile(r"Compiling entry function '(\w+)'")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")


class Kernel(NamedTuple):
    """What the compiler made of a kernel.

    Parameters
    ----------
    registers, spilled : int
        Per thread; bytes of registers that go to memory and back.
    loads, stores : list of int
        Bytes of each access of global memory, as they are written down: those of a loop once.
    """

    registers: int
    spilled: int
    loads: list[int]
    stores: list[int]


@cache
def compiled(name: str, arch: str) -> dict[str, Kernel]:
    """Compile a source for all element types, where that was never done; by kernel.

    Raises
    ------
    AssertionError
        With what nvcc said, if there is an error or a warning.
    """
    nvcc = find_nvcc()
    assert nvcc, "there is no nvcc"
    digest = hashlib.sha256(repr((version(nvcc), OPTIONS, options(None), arch)).encode())
    for text in (Path(__file__).read_text("utf-8"), *source_files(name).values()):
        digest.update(text.encode())
    path = user_cache() / "compiled" / f"{name}-{arch}-{digest.hexdigest()[:16]}.json"
    if not path.exists():
        write_file("compiled kernels", path, json.dumps(compile_source(nvcc, name, arch)).encode())
    return {kernel: Kernel(*fields) for kernel, fields in json.loads(path.read_bytes()).items()}


def compile_source(nvcc: str, name: str, arch: str) -> dict[str, Kernel]:
    with tempfile.TemporaryDirectory() as folder:
        files = ["--keep-dir", folder, "-o", f"{folder}/out.cubin", str(SOURCES / f"{name}.cu")]
        command = [nvcc, *options(None), f"-arch={arch}", *OPTIONS, *files]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "warning" not in done.stderr, done.stderr
        assert Path(folder, "out.cubin").read_bytes().startswith(b"\x7fELF")
        return read(done.stderr, Path(folder, f"{name}.ptx").read_text("utf-8"))


def read(said: str, ptx: str) -> dict[str, Kernel]:
    """Put together what `ptxas -v` says and what is in its input."""
    accesses = {
        entry[1]: [
            [int(lanes or 1) * int(bits) // 8 for kind, lanes, bits in found if kind == wanted]
            for found in [ACCESS.findall(entry[0])]
            for wanted in ("ld", "st")
        ]
        for entry in ENTRY.finditer(ptx)
    }
    kernels = {}
    for part in said.split("ptxas info")[1:]:
        if named := NAME.search(part):
            name, spilled = named[1], 0
        elif spills := SPILLS.search(part):
            spilled = max(map(int, spills.groups()))
        if used := REGISTERS.search(part):
            kernels[name] = Kernel(int(used[1]), spilled, *accesses[name])
    assert kernels.keys() == accesses.keys()
    return kernels


@cache
def version(nvcc: str) -> str:
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    return done.stdout
