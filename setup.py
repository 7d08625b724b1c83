"""Build of the compiled kernels; all metadata lives in ``pyproject.toml``.

Every ``_<family>.pyx`` of ``pydtnn/kernels/cpu``, ``pydtnn/comm`` and ``pydtnn/utils`` becomes
one extension module. Its C sources, ``src/<family>.c``, ``src/<family>_*.c`` and what ``SHARED``
adds, are templates: each is compiled once per instruction set and real type whose code differs,
and all its objects are linked into the extensions that use it. So one package carries every
variant, and the choice is made at run time. The environment variable ``PYDTNN_BUILD`` selects some
of them, or all; pip, which installs for this machine, compiles those of this CPU.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import TextIO

import numpy
from Cython.Build import cythonize
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, CompileError, PlatformError
from setuptools.modified import newer_group

CPU = Path("pydtnn/kernels/cpu")
COMM = Path("pydtnn/comm")
UTILS = Path("pydtnn/utils")
SRC = CPU / "src"  # with the headers that all templates share
SHARED = {  # templates besides a family's own
    "attention": ["gemm"],
    "conv": ["fused", "gemm"],
    "linear": ["gemm"],
    "recurrent": ["gemm"],
}
PLAIN = ["recycle"]  # sources without variants, linked into every family and _memory
INLINED = {"hash", "pixels"}  # kernels in a header, compiled with what wraps them
PYTHON_H = "#include <Python.h>\n"
STORED = {"conv", "elementwise", "linear", "norm", "pool", "random"}
"""Families with variants for arrays of bfloat16."""
ALL_TYPES = {"sum"}
"""Those with variants for all types in every build: training in float32 adds numbers of float64."""
MULTIPLYING = {"conv", "linear"}
"""Those with variants for the tile registers of AMX."""
REALS = {"f32": (1, 0), "f64": (0, 0), "bf16": (1, 1)}  # REAL_FLOAT, STORED_BF16
TYPES = {"float32": "f32", "float64": "f64", "bfloat16": "bf16"}
FRONT_END = bool({"_PYPROJECT_HOOKS_BUILD_BACKEND", "PEP517_BUILD_BACKEND"} & {*os.environ})
"""Whether pip or another front end runs this, which keeps what is printed to itself."""
SELECTED = os.environ.get("PYDTNN_BUILD", "native" if FRONT_END else "all").split()
"""Which instruction sets and which of `TYPES` are built, by default all; ``native`` is the widest
instruction set of this CPU, with those that it has for bfloat16. Where ``all`` stands alone, only
the generic set and the native one have float64, and the others use the widest of these that they
contain. `EMULATED` must be named."""
EMULATED = "amx_emulated"
TERMINAL = "/dev/tty"
PREFIX = '#include "scratch.h"\n#include "simd.h"\n'
"""What every template starts with, compiled once for each variant: its intrinsics take 0.5 s."""
SANITIZED = bool(os.environ.get("PYDTNN_SANITIZE"))
"""Whether this build reports accesses outside of memory: ``make sanitize``."""
SANITIZERS = ["-fsanitize=address,bounds,shift,signed-integer-overflow"] if SANITIZED else []
CALLS = ["--param", "asan-instrumentation-with-call-threshold=0"]  # code is compiled faster
CHECKED = ["-fsanitize-recover=address", *CALLS, "-O1", "-g1", "-UNDEBUG", "-DPLAIN_MEMORY"]
COMMON = [
    # without -g, which Python's flags contain, a kernel compiles in two thirds of the time
    *([*SANITIZERS, *CHECKED] if SANITIZED else ["-O3", "-g0"]),
    *("-std=gnu11", "-fno-math-errno", "-ffp-contract=fast", "-fvisibility=hidden"),
]
WITH_O2 = {"fused_sink"}
"""Templates that -O2 compiles in less time, to kernels as fast as those of -O3."""
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
WIDEST = """
#include <stdio.h>
#include "available.h"
int main(void) {
    int widest = ISA_AVX512;  // those that follow have kernels of bfloat16 only
    while (!isa_available(widest)) widest--;
    printf("%d", widest);
    for (int isa = ISA_AVX512_BF16; isa <= ISA_AMX; isa++) {
        if (isa_available(isa)) printf(" %d", isa);
    }
}
"""
PAIRS = {"avx512_bf16": STORED, "amx": MULTIPLYING, "amx_emulated": MULTIPLYING}
"""Instruction sets with kernels of bfloat16 only, and the families that have some."""
WITHOUT_STORED = {
    *("conv_depth", "conv_depthwise_backward", "conv_depthwise_gather", "conv_slide", "conv_views"),
    *("conv_walk", "conv_winograd_filters", "conv_winograd_multiply", "conv_winograd_transform"),
    *("gemm", "gemm_pack", "linear_few", "norm_response"),
}
"""Templates without stored elements: variants of bfloat16 call their functions of float32."""
WITHOUT_ROUNDING = {"gemm_turned", "linear_bias", "linear_rows"}
"""Those that only load stored elements: variants of `PAIRS` call those of avx512."""
OF_PAIRS = {"conv_winograd_filters", "conv_winograd_transform"}
"""Those of `WITHOUT_STORED` that are others for instruction sets with products of pairs."""
WITHOUT_PRODUCTS = {
    *("conv_block", "conv_depthwise", "conv_slide_pairs", "conv_winograd_tiles", *OF_PAIRS),
    *("fused", "fused_sink", "fused_source"),
}
"""Those from which no function with tiles is called: variants of amx call those of avx512_bf16."""
ONLY = {
    "conv_winograd_amx": {"amx", EMULATED},
    "elementwise_round": {"f32"},
    "gemm_amx": {"amx", EMULATED},
    "gemm_amx_emulated": {EMULATED},
    "linear_pairs": {*PAIRS},
    "linear_stored": {"bf16"},
}
"""Templates that are empty for other instruction sets or types than these."""
FRAME = 20 * 1024  # bytes of stack that a function may take: threads may have 64 KiB in all
STABLE_ABI = "cp311" if os.environ.get("PYDTNN_STABLE_ABI") else ""
"""The first Python whose stable ABI the extensions use, so that one wheel serves all later ones;
without it their calls are faster."""


def templates(family: str) -> list[str]:
    """C templates of a family, relative to the repository's root."""
    names = [family, *SHARED.get(family, ())]
    return sorted(
        str(path)
        for name in names
        for folder in (CPU, COMM)
        for path in (*folder.glob(f"src/{name}.c"), *folder.glob(f"src/{name}_*.c"))
    )


def lender(source: str, isa: str, real: str) -> tuple[str, str]:
    """Instruction set and type of the variant that has the code of this one, mostly itself."""
    name = Path(source).stem
    if real != "bf16":
        return isa, real
    shared = name in WITHOUT_STORED and not (isa in PAIRS and name in OF_PAIRS)
    if isa in PAIRS and (shared or name in WITHOUT_ROUNDING):
        isa = "avx512"
    elif isa in ("amx", EMULATED) and name in WITHOUT_PRODUCTS:
        isa = "avx512_bf16"
    return isa, "f32" if shared else real


def functions(source: str) -> list[str]:
    """Names of the functions and tables that a template defines for others, without suffix."""
    return re.findall(r"^\w[\w *]*\b(?:NAME|PRODUCTS)\((\w+)\)", Path(source).read_text(), re.M)


def borrowed(isa: str, real: str) -> list[str]:
    """Options that give functions the names that they have in the variants that lend them."""
    return [
        f"-D{function}_{isa}_{real}={function}_{'_'.join(variant)}"
        for source in sorted(map(str, SRC.glob("*.c")))
        if (variant := lender(source, isa, real)) != (isa, real)
        for function in functions(source)
    ]


def headers() -> list[str]:
    """Files besides the C sources that the kernels are rebuilt for when they change."""
    found = [*SRC.glob("*.h"), *CPU.glob("*.pxd"), *COMM.glob("src/*.h")]
    return ["setup.py", *sorted(map(str, found))]


def family_of(extension: Extension) -> str:
    """``conv`` for ``pydtnn.kernels.cpu._conv``."""
    return extension.name.rpartition("._")[2]


class Progress:
    """A line that counts on a terminal; elsewhere, one every ten seconds.

    Below a front end, the latter are written to the terminal, too, if there is one.
    """

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done = what, total, 0
        self.shown = time.monotonic()
        self.outputs: list[TextIO] = [sys.stdout]
        if FRONT_END and not sys.stdout.isatty():
            with suppress(OSError):
                self.outputs.append(open(TERMINAL, "w"))  # noqa: SIM115  # closed at the end

    def advance(self) -> None:
        """Count one more."""
        self.done += 1
        last = self.done == self.total
        if sys.stdout.isatty():
            end = "\n" if last else ""
            print(f"\rcompiling {self.what}: {self.done} of {self.total}", end=end, flush=True)
        elif last or time.monotonic() > self.shown + 10:
            self.shown = time.monotonic()
            for output in self.outputs:
                start = "" if output is sys.stdout else "\npydtnn: "
                line = f"{start}compiling {self.what}: {self.done} of {self.total}"
                print(line, file=output, flush=True)
        if last:
            for output in self.outputs[1:]:
                output.close()


class BuildKernels(build_ext):
    """Compile each template once per variant, then build and link the extensions as usual."""

    def build_extensions(self) -> None:
        """Find out what the compiler can do, compile the templates, build the extensions."""
        if self.compiler.compiler_type == "msvc":
            raise PlatformError("pydtnn's kernels need GCC's vector extensions; use gcc or clang.")
        self._require_tools()
        if self.editable_mode:  # pip gives temporary folders: use what was built before
            self.build_temp = f"build/temp.{self.plat_name}-{sys.implementation.cache_tag}"
            for extension in self.extensions:
                target = Path(self.get_ext_fullpath(extension.name))
                built = Path(*extension.name.split(".")[:-1], target.name)
                if built.exists():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(built, target)
        self.parallel = self.parallel or os.cpu_count() or 1
        if cache := shutil.which("ccache"):
            self.compiler.compiler_so.insert(0, cache)
            os.environ.setdefault("CCACHE_SLOPPINESS", "pch_defines,time_macros")
        self.openmp, link = self._openmp_flags()
        self.variants = self._selected()
        self._translate()
        self._compile_templates()
        plain = self._compile_plain()
        for extension in self.extensions:
            family = family_of(extension)
            sources = templates(family)
            built = list(self._variants(family))
            # an instruction set without kernels of a family has those of the one before
            kinds = {variant[1:] for variant in built} or self.variants
            names = {isa for isa, _ in self.variants} | {real for _, real in kinds}
            names |= {f"{isa}_{real}" for isa, real in kinds if real == "f64"}
            # what wraps templates only passes pointers: optimizing it would take most of its time
            optimized = ["-O1"] if family not in INLINED and not SANITIZED else []
            extension.extra_compile_args = [*COMMON, *self.openmp, *optimized]
            stripped = ["-s"] if sys.platform == "linux" and not (self.debug or SANITIZED) else []
            extension.extra_link_args = [*link, *SANITIZERS, *stripped]
            extension.define_macros += [(f"BUILT_{name.upper()}", "1") for name in sorted(names)]
            extension.extra_objects = [
                *(self._object(*variant) for variant in built),
                *(plain if sources or family == "memory" else ()),
            ]
            extension.depends += [*sources, *plain, *headers(), *extension.extra_objects]
            extension.depends.append(self._note(family, extension))
        super().build_extensions()

    def _note(self, family: str, extension: Extension) -> str:
        """Return a file that is newer than the extension if other options compile it now."""
        note = Path(self.build_temp) / f"{family}.options"
        options = repr(
            (extension.define_macros, extension.extra_compile_args, extension.extra_link_args)
        )
        if not note.exists() or note.read_text() != options:
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(options)
        return str(note)

    def _selected(self) -> set[tuple[str, str]]:
        """Pairs of an instruction set and a real type that this build has."""
        is_x86 = self.plat_name.endswith(("x86_64", "amd64"))
        known = [
            name
            for name, (_, flags) in INSTRUCTION_SETS.items()
            if name == "generic" or (is_x86 and self._accepts(flags))
        ]
        if unknown := {*SELECTED} - {"all", "native", *INSTRUCTION_SETS, *TYPES}:
            raise PlatformError(
                f"PYDTNN_BUILD selects all, native, {', '.join([*INSTRUCTION_SETS, *TYPES])}, "
                f"got {', '.join(sorted(unknown))}"
            )
        named = {*INSTRUCTION_SETS} & {*SELECTED}
        types = {TYPES[word] for word in SELECTED if word in TYPES}
        is_all = "all" in SELECTED or not {*INSTRUCTION_SETS, "native"} & {*SELECTED}
        few = is_all and not types  # sets have float64
        native = self._widest(known) if few or "native" in SELECTED else []
        sets = named | {*native[: 1 if types and "bf16" not in types else None]}
        if is_all:
            sets |= {*INSTRUCTION_SETS} - {EMULATED}
        if {*PAIRS} & sets:
            sets |= {"avx512", "avx512_bf16"}  # whose kernels of the other types these CPUs use
        sets &= {*known}
        doubles = sets & {"generic", *native[:1], *named} if few else sets
        kinds = {*product(sets, {"f32", *(types or REALS)})}
        return {(isa, real) for isa, real in kinds if real != "f64" or isa in doubles}

    def _widest(self, known: list[str]) -> list[str]:
        """The widest instruction set with kernels of all types that this CPU runs; then `PAIRS`."""
        macros = [(f"BUILT_{name.upper()}", "1") for name in known]
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "widest.c"
            source.write_text(WIDEST)
            objects = self.compiler.compile(
                [str(source)], output_dir=folder, include_dirs=[str(SRC)], macros=macros
            )
            self.compiler.link_executable(objects, "widest", output_dir=folder)
            numbers = subprocess.check_output([str(Path(folder) / "widest")])
        return [[*INSTRUCTION_SETS][int(number)] for number in numbers.split()]

    def _translate(self) -> None:
        """Translate the Cython sources that are out of date to C."""
        translated = cythonize(
            self.extensions,
            build_dir="build/cython",
            nthreads=self.parallel,
            quiet=True,
            compiler_directives=DIRECTIVES,
        )
        for extension, new in zip(self.extensions, translated, strict=True):
            extension.sources, extension.depends = new.sources, new.depends

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

        Where an instruction set has no variant, that of the one before is used, or its `lender`'s.
        """
        for variant in product(templates(family), INSTRUCTION_SETS, REALS):
            source, isa, real = variant
            if not {isa, real} & ONLY.get(Path(source).stem, {isa}):
                continue
            exists = family in PAIRS.get(isa, STORED) if real == "bf16" else isa not in PAIRS
            wanted = "f32" if family in ALL_TYPES else real
            if exists and (isa, wanted) in self.variants and lender(*variant) == (isa, real):
                yield variant

    def _folder(self, isa: str, real: str) -> str:
        """Folder of the objects of an instruction set and a real type; no version of Python."""
        return f"build/kernels.{self.plat_name}{'.sanitize' * SANITIZED}/{isa}_{real}"

    def _object(self, source: str, isa: str, real: str) -> str:
        """Object file of one variant of one template."""
        folder = self._folder(isa, real)
        [target] = self.compiler.object_filenames([source], output_dir=folder)
        return target

    def _is_stale(self, target: str, *more: str) -> bool:
        """Whether a file is missing, or older than `more` or what the compiler read for it."""
        read = Path(target).with_suffix(".d")
        if self.force or not read.exists():
            return True
        sources = read.read_text().replace("\\\n", " ").split()[1:]
        return bool(newer_group([*sources, *more], target, missing="newer"))

    def _flags(self, isa: str, real: str) -> list[str]:
        """Options that compile a template for an instruction set and a real type."""
        width, flags = INSTRUCTION_SETS[isa]
        is_float, is_half = REALS[real]
        return [
            *(
                f"-DVECTOR_BYTES={width}",
                f"-DREAL_FLOAT={is_float}",
                f"-DSTORED_BF16={is_half}",
            ),
            *(f"-DSUFFIX={isa}_{real}", f"-I{SRC}", "-MMD", "-fpch-preprocess"),
            *("-Wall", "-Wextra", *COMMON, *self.openmp, *flags),
            *(() if SANITIZED else (f"-Wframe-larger-than={FRAME}",)),
        ]

    def _compile_templates(self) -> None:
        """Compile what is out of date, as many at a time as there are cores, or ``-j`` says."""
        variants = {v for ext in self.extensions for v in self._variants(family_of(ext))}
        kinds = sorted({variant[1:] for variant in variants})
        for isa, real in kinds:
            options = [*self._flags(isa, real), *borrowed(isa, real)]
            command = " ".join([*self.compiler.compiler_so, *options])
            note = Path(self._folder(isa, real)) / "command"
            if not note.exists() or note.read_text() != command:  # other objects than these
                shutil.rmtree(note.parent, ignore_errors=True)
                note.parent.mkdir(parents=True)
                note.write_text(command)
                Path(self._prefix(isa, real)).write_text(PREFIX)
        with ThreadPoolExecutor(self.parallel) as pool:
            list(pool.map(lambda kind: self._precompile(*kind), kinds))
            stale = [
                variant
                for variant in sorted(variants)
                if self._is_stale(self._object(*variant), f"{self._prefix(*variant[1:])}.gch")
            ]
            progress = Progress("kernels", len(stale))
            for _ in pool.map(lambda variant: self._compile(*variant), stale):
                progress.advance()

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

    def _prefix(self, isa: str, real: str) -> str:
        """Header with which the templates of a variant start; beside it lies the compiled one."""
        return f"{self._folder(isa, real)}/prefix.h"

    def _precompile(self, isa: str, real: str) -> None:
        header = self._prefix(isa, real)
        if self._is_stale(f"{header}.gch"):
            self._run(isa, real, "-x", "c-header", header, "-o", f"{header}.gch")

    def _compile(self, source: str, isa: str, real: str) -> None:
        target = self._object(source, isa, real)
        self.mkpath(os.path.dirname(target))
        options = [*borrowed(isa, real), "-include", self._prefix(isa, real)]
        if Path(source).stem in WITH_O2 and not SANITIZED:
            options.append("-O2")
        self._run(isa, real, *options, "-c", source, "-o", target)

    def _run(self, isa: str, real: str, *arguments: str) -> None:
        flags = self._flags(isa, real)  # and no folders of Python, which templates do not include
        command = [*self.compiler.compiler_so, *flags, *arguments]
        if subprocess.run(command, check=False).returncode != 0:
            raise CompileError(f"{' '.join(command)} failed")

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
                *([("Py_LIMITED_API", "0x030B0000")] if STABLE_ABI else []),
            ],
            py_limited_api=bool(STABLE_ABI),
        )
        for path in sorted([*CPU.glob("_*.pyx"), *COMM.glob("_*.pyx"), *UTILS.glob("_*.pyx")])
    ]


def packages() -> list[str]:
    """Our packages; the folder ``models`` is installed as ``pydtnn.models``."""
    models = ["pydtnn.models"] if Path("models/__init__.py").exists() else []
    inner = [f"pydtnn.models.{name}" for name in find_packages("models")]
    return [*find_packages(include=["pydtnn", "pydtnn.*"]), *models, *inner]


DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "cdivision": True,
    "initializedcheck": False,
    "embedsignature": True,
    "binding": False,  # methods are called faster, and a fifth of what Cython adds is not compiled
}

setup(
    packages=packages(),
    package_dir={"pydtnn.models": "models"},
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildKernels},
    options={"bdist_wheel": {"py_limited_api": STABLE_ABI}} if STABLE_ABI else {},
)
