"""Build of the compiled kernels; all metadata lives in ``pyproject.toml``.

Every ``pydtnn/kernels/cpu/_<family>.pyx`` becomes one extension module. Its C sources, ``src/<family>*.c`` and what
``SHARED`` adds, are templates: each is compiled once per instruction set and real type and all the objects are linked into
that one extension, so that a wheel carries every variant and the choice is made when a backend is created.
"""

from __future__ import annotations

import os
import platform
import tempfile
from pathlib import Path

import numpy
from Cython.Build import cythonize
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, PlatformError
from setuptools.modified import newer_group

CPU = Path("pydtnn/kernels/cpu")
SRC = CPU / "src"
SHARED = {"linear": ["gemm"], "conv": ["gemm"]}  # templates that a family needs besides its own
REALS = {"f32": "1", "f64": "0"}
COMMON = ["-O3", "-std=gnu11", "-fno-math-errno", "-ffp-contract=fast", "-fvisibility=hidden"]
AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mpopcnt"]
AVX512 = ["-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mavx512cd"]
INSTRUCTION_SETS = {  # name: (bytes of a vector, flags)
    "generic": (16, []),
    "avx2": (32, AVX2),
    "avx512": (64, [*AVX2, *AVX512, "-mprefer-vector-width=512"]),
}
X86 = platform.machine().lower() in {"x86_64", "amd64"}


def templates(family: str) -> list[str]:
    """C templates of a family, relative to the repository's root."""
    own = sorted(str(path) for path in SRC.glob(f"{family}*.c"))
    return own + [str(SRC / f"{name}.c") for name in SHARED.get(family, ())]


def headers() -> list[str]:
    """Everything but the C files that a change of must rebuild the extensions for."""
    return ["setup.py", *sorted(str(path) for path in [*SRC.glob("*.h"), *CPU.glob("*.pxd")])]


class BuildKernels(build_ext):
    """Compile the templates once per variant, then build and link the extension as usual."""

    def build_extensions(self) -> None:
        """Find out what the compiler can do, then build everything."""
        if self.compiler.compiler_type == "msvc":
            raise PlatformError("pydtnn's kernels use GCC's vector extensions; build them with gcc or clang.")
        self.openmp, link = self._openmp_flags()
        self.sets = {
            name: variant
            for name, variant in INSTRUCTION_SETS.items()
            if name == "generic" or (X86 and self._accepts(variant[1]))
        }
        for extension in self.extensions:
            extension.extra_compile_args = [*COMMON, *self.openmp]
            extension.extra_link_args = [*link]
            extension.define_macros += [(f"BUILT_{name.upper()}", "1") for name in self.sets]
        super().build_extensions()

    def build_extension(self, extension: Extension) -> None:
        """Compile the templates of one family and build its extension."""
        family = extension.name.rpartition("._")[2]
        sources = templates(family)
        extension.depends = [*extension.depends, *sources, *headers()]
        extension.extra_objects = [
            self._compile(family, source, isa, real)
            for source in sources
            for isa in self.sets
            for real in REALS
        ]
        super().build_extension(extension)

    def _compile(self, family: str, source: str, isa: str, real: str) -> str:
        """Compile one variant of one template unless its object is up to date; returns the object."""
        folder = os.path.join(self.build_temp, family, f"{isa}_{real}")
        width, flags = self.sets[isa]
        [target] = self.compiler.object_filenames([source], output_dir=folder)
        if self.force or newer_group([source, *headers()], target):
            self.compiler.compile(
                [source],
                output_dir=folder,
                include_dirs=[str(SRC)],
                macros=[
                    ("VECTOR_BYTES", str(width)),
                    ("REAL_FLOAT", REALS[real]),
                    ("SUFFIX", f"{isa}_{real}"),
                ],
                extra_postargs=["-Wall", "-Wextra", *COMMON, *self.openmp, *flags],
            )
        return target

    def _openmp_flags(self) -> tuple[list[str], list[str]]:
        """OpenMP's flags for compiling and linking; none where it is missing: kernels then run on one thread."""
        for compile_flags, link_flags in (
            (["-fopenmp"], ["-fopenmp"]),
            (["-Xpreprocessor", "-fopenmp"], ["-lomp"]),  # Apple's clang with Homebrew's libomp
        ):
            if self._accepts(compile_flags, link_flags, "#include <omp.h>\n"):
                return compile_flags, link_flags
        self.warn("the compiler has no OpenMP: the kernels will use one thread")
        return ["-Wno-unknown-pragmas"], []

    def _accepts(self, flags: list[str], link: list[str] | None = None, code: str = "") -> bool:
        """Whether a small program compiles (and links, if ``link`` is given) with these flags."""
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
            except Exception as error:  # compile and link errors have no common base in all versions
                if isinstance(error, (CompileError, OSError)) or "Error" in type(error).__name__:
                    return False
                raise
        return True


def extensions() -> list[Extension]:
    """One extension per ``_<family>.pyx``."""
    return [
        Extension(
            f"pydtnn.kernels.cpu.{path.stem}",
            [str(path)],
            include_dirs=[str(SRC), numpy.get_include()],
            define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")],
            language="c",
        )
        for path in sorted(CPU.glob("_*.pyx"))
    ]


def packages() -> list[str]:
    """Our packages; the folder ``models`` is installed as ``pydtnn.models``."""
    models = [f"pydtnn.models.{name}" for name in find_packages("models")]
    top = ["pydtnn.models"] if Path("models/__init__.py").exists() else []
    return [*find_packages(include=["pydtnn", "pydtnn.*"]), *top, *models]


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
