"""Fixtures of all tests, and the plugins that run tests on several ranks (`groups`, `mpi_*`)."""

from __future__ import annotations

import gc
import os
import re
import signal
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import noisy_clock

if NOISY := os.environ.get("PYDTNN_NOISY_CLOCK"):  # before anything keeps a clock
    noisy_clock.install(int(NOISY))

from pydtnn.comm import Communicator
from pydtnn.kernels import BACKENDS, Backend, create_backend
from pydtnn.utils.machine import limit_blas_threads
from tests import core, gpu, launch, measure, simulated
from tests.ahead import _started, ahead, mpiexec  # noqa: F401  fixtures
from tests.each import FEW_SIMULATED
from tests.groups import Groups
from tests.mpi_harness import REPORTS, Harness, join_world
from tests.random_cases import Cases, Fuzz, add_options

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's command in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["PYDTNN_TUNING"] = "fixed"  # results must not depend on what was faster today
gc.disable()  # while tests are collected, which takes a quarter longer with it

LONG = (
    *("tests/benchmarks/", "tests/fuzz/", "tests/kernels/cuda/", "tests/simulated/"),
    *(f"tests/comm/test_{name}.py" for name in ("nccl", "staged", "training_on_device")),
    *("tests/training/test_capture.py", "tests/training/test_train_on_device.py"),
    *("tests/parity/", "tests/parallel/compression/test_training.py"),
    *("tests/tools/interchange/test_torch.py", "tests/test_packaging.py"),
    *("tests/tools/testing/test_harness.py", "tests/model/test_memory.py"),
)
"""Tests that only `make test-all` runs: they compile, emulate and simulate GPU code, run
benchmarks, draw random cases (as does `make fuzz`), train for a minute, run beside PyTorch, build
distributions, measure memory, read files of PyTorch, or combine schemes with compressors.
Single tests are marked in their files: cases of a product of parameters all of which occur in other
cases."""

GPU = (
    *("tests/kernels/cuda/", "tests/simulated/"),
    *(f"tests/comm/test_{name}.py" for name in ("nccl", "staged", "training_on_device")),
    *("tests/training/test_capture.py", "tests/training/test_train_on_device.py"),
)
"""Tests of GPU code: where a GPU is simulated, cases with each value are enough of a product."""


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)
    parser.addoption("--matrix", action="store_true", help="run every case of large sets, too")


@pytest.hookimpl(trylast=True)  # when the reporter is there, which all ranks but one take away
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "mpi(*ranks): runs on MPI ranks, by default 1, 2, 3 and 4.")
    config.addinivalue_line("markers", "threads(*ranks): runs on ranks that are threads.")
    world = join_world(config)
    config.pluginmanager.register(Groups(world), "groups")
    config.pluginmanager.register(world or Harness(config), "mpi")
    config.addinivalue_line("markers", "ahead(call): has it called early, for the fixture ahead.")
    config.addinivalue_line("markers", "fuzz(kind): draws random cases, by the fixture cases.")
    config.pluginmanager.register(Fuzz(), "fuzz")
    config.addinivalue_line("markers", "long: is run by `make test-all`; see LONG.")
    config.addinivalue_line("markers", "measure: is run by `make measure`; see tests/measure.py.")
    if config.getoption("markexpr") == "measure":
        config.pluginmanager.register(measure.Budgets(), "budgets")
    config.addinivalue_line(
        "markers", "tools: needs the tools, or code for GPUs: see tests/core.py."
    )
    config.addinivalue_line("markers", "few(n): `make test` runs n of its cases; others are long.")
    config.addinivalue_line("markers", "emulated: runs with emulated instructions, too.")
    config.addinivalue_line("markers", "matrix: is run with --matrix only.")
    config.addinivalue_line(
        "markers", "covering(n): each n values are in one of its cases; others are matrix."
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no files of long tests where none of them is run, unless paths are given.

    Nor files that import what `tests.core` has deleted.
    """
    if core.MISSING and collection_path.match("test_*.py") and core.absent(collection_path):
        return True
    wanted = config.option.markexpr.split(" and ")
    if "not long" not in wanted or config.args != config.getini("testpaths"):
        return None
    path = collection_path.relative_to(config.rootpath).as_posix()
    return f"{path}/".startswith(LONG) or path.startswith(LONG) or None


@pytest.hookimpl(tryfirst=True)  # what is left out need not be sorted by its fixtures
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(LONG):
            item.add_marker("long")
    if core.MISSING:
        left_out = [item for item in items if item.get_closest_marker("tools")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("tools")]
    measure.mark(items)
    if NOISY:
        items[:] = [i for i in items if not i.nodeid.startswith(noisy_clock.ABOUT_CLOCKS)]
    if not config.getoption("--matrix") and REPORTS not in os.environ:
        left_out = {item for item in items if item.get_closest_marker("matrix")}
        others = (item for item in items if item not in left_out)
        left_out.update(repeating(others, config.getoption("fuzz_first")))
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]
    for cases in _cases(items).values():
        few = cases[0].get_closest_marker("few").args[0]
        step = max(len(cases) / few, 1)
        for item in {*cases} - {cases[int((i + 0.5) * step)] for i in range(min(few, len(cases)))}:
            item.add_marker("long")


def pytest_collection_finish() -> None:
    """Leave thousands of tests out of later garbage collections: the end of a run asks for one."""
    gc.collect()
    gc.freeze()
    gc.enable()


def repeating(items: Iterable[pytest.Item], seed: int = 0) -> list[pytest.Item]:
    """Cases whose combinations of values are those of others, see `covering`, `GPU`, `repeats`."""
    found: list[pytest.Item] = []
    seen: set[tuple[Any, ...]] = set()
    simulated_cases: Counter[str] = Counter()
    # In a random order: in theirs only the last parameter of many cases differs.
    for item in sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode(), seed % 2**32)):
        callspec, test = getattr(item, "callspec", None), item.nodeid.partition("[")[0]
        if callspec is None:
            continue
        covering = item.get_closest_marker("covering")
        if covering or (item.nodeid.startswith(GPU) and gpu.why_not()):
            values = values_of(item, callspec.params)
            n = min(covering.args[0] if covering else 1, len(values))
            new = {(test, *some) for some in combinations(values, n)} - seen
            seen |= new
        elif callspec.params.get("backend") == "cuda" and gpu.why_not():
            new = simulated_cases[test] % FEW_SIMULATED == 0
            simulated_cases[test] += 1
        elif {"cpu_backend", "dtype"} <= {*callspec.params}:
            size = np.dtype(callspec.params["dtype"]).itemsize
            new = not repeats(callspec.params["cpu_backend"], size)
        else:
            continue
        if not new:
            found.append(item)
    return found


@cache
def repeats(isa: str, size: int) -> bool:
    """Whether cases of an instruction set for elements of `size` bytes run the kernels of others.

    Of those with the same kernels the widest set remains if its cases are short, else the first.
    """
    from pydtnn.kernels.cpu.isa import PAIRING, available, of_float64

    def kernels(name: str) -> str | None:
        return of_float64(name) if size == 8 else "avx512" if name in PAIRING else name

    sets = available()
    alike = [name for name in sets if kernels(name) == kernels(isa)]
    return size > 2 and isa != (alike[-1] if alike[-1] == sets[-1] else alike[0])


def values_of(item: pytest.Item, parameters: dict[str, Any]) -> list[str]:
    """The values of a case; those that a mark gives together, as a row, are one."""
    rows = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        rows.append(re.findall(r"\w+", names) if isinstance(names, str) else [*names])
    rows += [[name] for name in parameters if not any(name in row for row in rows)]
    return [repr([(name, parameters[name]) for name in row]) for row in rows]


def _cases(items: list[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """The cases of each test of which `make test` runs a few, but those that are long anyway."""
    found: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("long"):
            found.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return found


def pytest_report_header() -> str:
    """Say what "cuda" means in this run."""
    no_gpu, no_simulation = gpu.why_not(), simulated.why_not()
    if not no_gpu:
        return f"cuda: {gpu.name()}"
    return f"cuda: {no_gpu}; " + (no_simulation or "a device is simulated (tests/simulated)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cpu_backend" in metafunc.fixturenames:
        emulated = metafunc.definition.get_closest_marker("emulated") is not None
        every = metafunc.function.__name__ == "test_every_kernel_agrees_with_the_reference"
        cases = cpu_cases(emulated=emulated, first=every)
        metafunc.parametrize("cpu_backend", cases, indirect=True)


def instruction_sets() -> list[str]:
    try:
        from pydtnn.kernels.cpu.isa import available
    except ImportError:
        return ["not built"]
    return list(available())


def cpu_cases(*, emulated: bool = False, first: bool = False) -> list[Any]:
    """The instruction sets as parameters; all but the newest are long tests.

    With `first`, the oldest is none; with `emulated`, also AMX with its instructions emulated, if
    it runs here.
    """
    *older, last = instruction_sets()
    long = [pytest.param(name, marks=pytest.mark.long) for name in older[first:]]
    return [*older[:first], *long, last, *(emulations() if emulated else ())]


def emulations() -> list[str]:
    try:
        from pydtnn.kernels.cpu.isa import EMULATED, runs
    except ImportError:
        return []
    return [EMULATED] if runs(EMULATED) else []


CUDA: Any = pytest.param("cuda", marks=pytest.mark.long) if gpu.why_not() else "cuda"
"""The parameter "cuda"; without a GPU it is simulated, in long tests."""


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what tests measure out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYDTNN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_thread_of_blas() -> Iterator[None]:
    """As in training from the command line: matrices are small, and threads that wait spin."""
    with limit_blas_threads(1):
        yield


@pytest.fixture
def cases(request: pytest.FixtureRequest) -> Cases:
    """Random cases until the time of this test is over (`tests.random_cases`)."""
    return request.config.pluginmanager.get_plugin("fuzz").cases(request)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator seeded by the test's name: the same on every rank and for every parameter."""
    return np.random.default_rng(zlib.crc32(request.function.__qualname__.encode()))


@pytest.fixture(
    params=[CUDA if name == "cuda" else name for name in sorted(BACKENDS, reverse=True)]
)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each backend in turn: "numpy", the reference, "cuda", perhaps simulated, and "cpu"."""
    if request.param == "cuda":
        return cuda_backend()
    return _create_backend(request.param, threads=1)  # no spinning where cores are busy


def cuda_backend() -> Backend:
    """The GPU, whose float32 is float32, or a simulated one."""
    if not gpu.why_not():
        return _create_backend("cuda", tf32=False)
    if simulated.why_not():
        pytest.skip(f"{gpu.why_not()}, and {simulated.why_not()}")
    return simulated.simulated_backend(eager=True)


@pytest.fixture
def cpu_backend(request: pytest.FixtureRequest) -> Backend:
    """The cpu backend, with each instruction set that this machine has: for tests of kernels."""
    return _create_backend("cpu", isa=request.param)


def _create_backend(name: str, **options: Any) -> Backend:
    try:
        return create_backend(name, **options)
    except ImportError as error:
        pytest.skip(f"backend {name} is not here: {error}")


@pytest.fixture(name="mpiexec")
def _mpiexec() -> Callable[..., launch.Finished]:
    """`mpiexec(ranks, ["-m", "pydtnn.train", ...])` runs Python on so many ranks (`launch.run`)."""
    return mpiexec


@pytest.fixture
def shared_path(comm: Any, tmp_path: Path) -> Path:
    """A folder that is empty before the test and the same for all of its ranks."""
    if isinstance(comm, Communicator):
        return Path(comm.gather_object(str(tmp_path))[0])
    return tmp_path
