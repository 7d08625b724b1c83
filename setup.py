"""Build of the compiled kernels; all metadata lives in ``pyproject.toml``.

Every ``_<family>.pyx`` of ``pydtnn/kernels/cpu``, ``pydtnn/comm`` and ``pydtnn/tracing`` becomes
one extension module. Its C sources, ``src/<family>.c``, ``src/<family>_*.c`` and what ``SHARED``
adds, are templates: each is compiled once per instruction set and real type, and all its objects
are linked into the extensions that use it. So one package carries every variant, and the choice is
made at run time.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import numpy
from Cython.Build import cythonize
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, PlatformError
from setuptools.modified import newer_group

CPU = Path("pydtnn/kernels/cpu")
COMM = Path("pydtnn/comm")
TRACING = Path("pydtnn/tracing")
SRC = CPU / "src"  # with the headers that all templates share
SHARED = {  # templates besides a family's own
    "attention": ["gemm"],
    "conv": ["fused", "gemm"],
    "linear": ["gemm"],
    "recurrent": ["gemm"],
}
PLAIN = ["recycle"]  # sources without variants, linked into every family and _memory
PYTHON_H = "#include <Python.h>\n"
STORED = {"conv", "elementwise", "fused", "linear", "norm", "pool", "random"}
"""Families with variants for arrays of bfloat16."""
MULTIPLYING = {"conv", "linear"}
"""Those with variants for the tile registers of AMX."""
REALS = {"f32": (1, 0), "f64": (0, 0), "bf16": (1, 1)}  # REAL_FLOAT, STORED_BF16
SANITIZED = os.environ.get("PYDTNN_SANITIZE", "").split()
"""The instruction sets of a build that reports accesses outside of memory: ``make sanitize``."""
SANITIZERS = ["-fsanitize=address,bounds,shift,signed-integer-overflow"] if SANITIZED else []
CALLS = ["--param", "asan-instrumentation-with-call-threshold=0"]  # code is compiled faster
CHECKED = ["-fsanitize-recover=address", *CALLS, "-O1", "-g1", "-UNDEBUG", "-DPLAIN_MEMORY"]
COMMON = [
    # without -g, which Python's flags contain, a kernel compiles in two thirds of the time
    *([*SANITIZERS, *CHECKED] if SANITIZED else ["-O3", "-g0"]),
    *("-std=gnu11", "-fno-math-errno", "-ffp-contract=fast", "-fvisibility=hidden"),
]
AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mpopcnt"]
AVX512 = ["-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mavx512cd"]
AVX512_BF16 = [*AVX2, *AVX512, "-mprefer-vector-width=512", "-mavx512bf16"]
INSTRUCTION_SETS = {  # name: (bytes of a vector, flags)
    "generic": (16, []),
    "avx2": (32, AVX2),
    "avx512": (64, [*AVX2, *AVX512, "-mprefer-vector-width=512"]),
    "avx512_bf16": (64, AVX512_BF16),
    "amx": (64, [*AVX512_BF16, "-mamx-tile", "-mamx-bf16"]),
    "amx_emulated": (64, [*AVX512_BF16, "-DEMULATED_AMX"]),
}
PAIRS = {"avx512_bf16": STORED, "amx": MULTIPLYING, "amx_emulated": MULTIPLYING}
"""Instruction sets with kernels of bfloat16 only, and the families that have some."""
FRAME = 20 * 1024  # bytes of stack that a function may take: threads may have 64 KiB in all
X86 = platform.machine().lower() in {"x86_64", "amd64"}


def templates(family: str) -> list[str]:
    """C templates of a family, relative to the repository's root."""
    names = [family, *SHARED.get(family, ())]
    return sorted(
        str(path)
        for name in names
        for folder in (CPU, COMM)
        for path in (*folder.glob(f"src/{name}.c"), *folder.glob(f"src/{name}_*.c"))
    )


def headers() -> list[str]:
    """Files besides the C sources that the kernels are rebuilt for when they change."""
    found = [*SRC.glob("*.h"), *CPU.glob("*.pxd"), *COMM.glob("src/*.h")]
    return ["setup.py", *sorted(map(str, found))]


def family_of(extension: Extension) -> str:
    """``conv`` for ``pydtnn.kernels.cpu._conv``."""
    return extension.name.rpartition("._")[2]


class BuildKernels(build_ext):
    """Compile each template once per variant, then build and link the extensions as usual."""

    def build_extensions(self) -> None:
        """Find out what the compiler can do, compile the templates, build the extensions."""
        if self.compiler.compiler_type == "msvc":
            raise PlatformError("pydtnn's kernels need GCC's vector extensions; use gcc or clang.")
        self._require_tools()
        if self.editable_mode:  # pip's folder is temporary; the next build uses these objects
            self.build_temp = f"build/temp.{self.plat_name}-{sys.implementation.cache_tag}"
        self.parallel = self.parallel or os.cpu_count() or 1
        self.openmp, link = self._openmp_flags()
        self.sets = [
            name
            for name, (_, flags) in INSTRUCTION_SETS.items()
            if (name == "generic" or (X86 and self._accepts(flags)))
            and (name in SANITIZED or not SANITIZED)
        ]
        self._compile_templates()
        plain = self._compile_plain()
        for extension in self.extensions:
            family = family_of(extension)
            sources = templates(family)
            extension.extra_compile_args = [*COMMON, *self.openmp]
            extension.extra_link_args = [*link, *SANITIZERS]
            extension.define_macros += [(f"BUILT_{name.upper()}", "1") for name in self.sets]
            extension.depends = [*extension.depends, *sources, *plain, *headers()]
            extension.extra_objects = [
                *(self._object(*variant) for variant in self._variants(family)),
                *(plain if sources or family == "memory" else ()),
            ]
        super().build_extensions()

    def _require_tools(self) -> None:
        """Stop in one sentence, which pip shows too, without a compiler or Python's headers."""
        command = self.compiler.compiler_so[0]
        if not self._accepts([]):
            raise PlatformError(
                f"pydtnn's kernels need a C compiler, and {command!r} cannot compile a program: "
                "install gcc or clang, or name one with CC=..."
            )
        if not self._accepts([f"-I{path}" for path in self.include_dirs], code=PYTHON_H):
            raise PlatformError(
                f"pydtnn's kernels need Python's C headers, and {sys.executable!r} came without "
                "them: install them (Debian, Ubuntu: python3-dev; Fedora: python3-devel)"
            )

    def _variants(self, family: str) -> Iterator[tuple[str, str, str]]:
        """Every (source, instruction set, real type) of a family.

        Where an instruction set has no variant, that of the one before is used.
        """
        for variant in product(templates(family), self.sets, REALS):
            _, isa, real = variant
            if family in PAIRS.get(isa, STORED) if real == "bf16" else isa not in PAIRS:
                yield variant

    def _object(self, source: str, isa: str, real: str) -> str:
        """Object file of one variant of one template."""
        folder = os.path.join(self.build_temp, f"{isa}_{real}")
        [target] = self.compiler.object_filenames([source], output_dir=folder)
        return target

    def _compile_templates(self) -> None:
        """Compile what is out of date, as many at a time as there are cores, or ``-j`` says."""
        variants = {v for ext in self.extensions for v in self._variants(family_of(ext))}
        stale = [
            variant
            for variant in sorted(variants)
            if self.force or newer_group([variant[0], *headers()], self._object(*variant))
        ]
        with ThreadPoolExecutor(self.parallel) as pool:
            list(pool.map(lambda variant: self._compile(*variant), stale))

    def _compile_plain(self) -> list[str]:
        """Compile what has no variants if it is out of date; return the object files."""
        sources = [str(SRC / f"{name}.c") for name in PLAIN]
        objects = self.compiler.object_filenames(sources, output_dir=self.build_temp)
        stale = [
            source
            for source, target in zip(sources, objects, strict=True)
            if self.force or newer_group([source, *headers()], target)
        ]
        flags = ["-Wall", "-Wextra", *COMMON]
        self.compiler.compile(stale, output_dir=self.build_temp, extra_postargs=flags)
        return objects

    def _compile(self, source: str, isa: str, real: str) -> None:
        width, flags = INSTRUCTION_SETS[isa]
        self.compiler.compile(
            [source],
            output_dir=os.path.join(self.build_temp, f"{isa}_{real}"),
            include_dirs=[str(SRC)],
            macros=[
                ("VECTOR_BYTES", str(width)),
                ("REAL_FLOAT", str(REALS[real][0])),
                ("STORED_BF16", str(REALS[real][1])),
                ("SUFFIX", f"{isa}_{real}"),
            ],
            extra_postargs=[
                *("-include", str(SRC / "scratch.h")),
                *("-Wall", "-Wextra", *COMMON, *self.openmp, *flags),
                *(() if SANITIZED else (f"-Wframe-larger-than={FRAME}",)),
            ],
        )

    def _openmp_flags(self) -> tuple[list[str], list[str]]:
        """Flags of OpenMP for compiling and linking; without OpenMP the kernels use one thread."""
        for compile_flags, link_flags in (
            (["-fopenmp"], ["-fopenmp"]),
            (["-Xpreprocessor", "-fopenmp"], ["-lomp"]),  # Apple's clang with Homebrew's libomp
        ):
            if self._accepts(compile_flags, link_flags, "#include <omp.h>\n"):
                return compile_flags, link_flags
        self.warn("the compiler has no OpenMP: the kernels will use one thread")
        return ["-Wno-unknown-pragmas", "-Wno-unused-parameter"], []

    def _accepts(self, flags: list[str], link: list[str] | None = None, code: str = "") -> bool:
        """Whether a small program compiles with these flags, and links if `link` is given."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "probe.c"
            source.write_text(code + "int main(void) { return 0; }\n")
            try:
                objects = self.compiler.compile(
                    [str(source)], output_dir=folder, extra_postargs=["-Werror", *flags]
                )
                if link is not None:
                    self.compiler.link_executable(
                        objects, "probe", output_dir=folder, extra_postargs=link
                    )
            except CCompilerError:
                return False
        return True


def extensions() -> list[Extension]:
    """One extension per ``_<family>.pyx``."""
    return [
        Extension(
            ".".join(path.with_suffix("").parts),
            [str(path)],
            include_dirs=[str(path.parent / "src"), str(SRC), numpy.get_include()],
            define_macros=[
                ("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION"),
                ("NPY_TARGET_VERSION", "NPY_2_0_API_VERSION"),
            ],
        )
        for path in sorted([*CPU.glob("_*.pyx"), *COMM.glob("_*.pyx"), *TRACING.glob("_*.pyx")])
    ]


def packages() -> list[str]:
    """Our packages; the folder ``models`` is installed as ``pydtnn.models``."""
    models = ["pydtnn.models"] if Path("models/__init__.py").exists() else []
    inner = [f"pydtnn.models.{name}" for name in find_packages("models")]
    return [*find_packages(include=["pydtnn", "pydtnn.*"]), *models, *inner]


setup(
    packages=packages(),
    package_dir={"pydtnn.models": "models"},
    ext_modules=cythonize(
        extensions(),
        build_dir="build/cython",
        compiler_directives={
            "language_level": 3,
            "boundscheck": False,
            "wraparound": False,
            "cdivision": True,
            "initializedcheck": False,
            "embedsignature": True,
        },
    ),
    cmdclass={"build_ext": BuildKernels},
)
