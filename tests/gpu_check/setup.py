"""An environment for the checks, without a network: this Python's packages, wheels, and pydtnn.

    python -m tests.gpu_check.setup --environment build/gpu --wheels FOLDER

The environment sees all that the Python which makes it sees, so PyTorch and CuPy need not be
brought, and nothing outside of the folder is changed. Wheels are installed into it, so an MPI among
them has its mpiexec beside Python; then pydtnn, whose extensions are built, and our CUDA kernels
are compiled with nvcc, side by side, for the GPU that is there. A second call builds what has
changed. Where extensions cannot be built, for want of a compiler or of Python's headers, all is set
up without them: the backend ``cpu`` is missing then, which nothing on a GPU needs.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CUBINS = "cubins"


def python_of(environment: Path) -> Path:
    """Return the interpreter of an environment."""
    return environment / "bin" / "python"


def site_of(environment: Path) -> Path:
    """Return the folder of an environment's packages."""
    inside = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(run(str(python_of(environment)), "-c", inside).strip())


def make(environment: Path) -> None:
    """Make an environment that sees what this Python sees."""
    if python_of(environment).exists():
        return
    shutil.rmtree(environment, ignore_errors=True)
    run(sys.executable, "-m", "venv", "--without-pip", str(environment))
    site = site_of(environment)
    outside = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    # Paths added so are searched after the environment's own; `site` reads their .pth files too.
    # CuPy looks for NVIDIA's wheels below the prefixes alone (`site.getsitepackages`).
    lines = [f"import site; site.PREFIXES.append({sys.prefix!r})"]
    lines += [f"import site; site.addsitedir({path!r})" for path in outside]
    (site / "outside.pth").write_text("\n".join(lines) + "\n")


def install(environment: Path, wheels: Path | None) -> None:
    """Install wheels, then pydtnn where it lies; say so if that is without its extensions."""
    pip = [sys.executable, "-m", "pip", "--python", str(python_of(environment)), "install"]
    pip += ["--quiet", "--no-index", "--no-deps", "--disable-pip-version-check"]
    found = sorted(map(str, wheels.glob("*.whl"))) if wheels else []
    if found:
        run(*pip, "--ignore-installed", *found)  # which lie outside and stay there
    try:
        if (environment / "bin" / "pydtnn-train").exists():  # what has changed must be compiled
            run(str(python_of(environment)), "setup.py", "--quiet", "build_ext", "--inplace")
        else:
            run(*pip, "--no-build-isolation", "--editable", str(ROOT))
    except RuntimeError as error:
        print(f"gpu_setup: {error}\npydtnn is used without its extensions: no backend cpu")
        use_sources(environment)


def use_sources(environment: Path) -> None:
    """Let the environment see pydtnn as it lies, where it cannot be built."""
    (site_of(environment) / "pydtnn_sources.pth").write_text(f"{ROOT}\n")
    models = ROOT / "pydtnn" / "models"  # where an installation puts them
    if not models.exists():
        models.symlink_to(Path("..") / "models")


def compile_kernels(environment: Path, arch: str) -> int:
    """Compile our CUDA sources; return how many files of machine code there are."""
    from pydtnn.kernels.cuda.module import prebuild

    return prebuild(environment / CUBINS, arch)


def architecture() -> str:
    """Return what the GPU is called by compilers, such as "sm_90"."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    return "sm_" + run(*query).split()[0].replace(".", "")


def run(*command: str) -> str:
    """Run a command; return what it printed.

    Raises
    ------
    RuntimeError
        With the end of what it said, if it fails.
    """
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError as error:
        raise RuntimeError(f"{command[0]}: {error}") from error
    if done.returncode:
        said = (done.stdout + done.stderr)[-3000:]
        raise RuntimeError(f"{' '.join(command)}: status {done.returncode}\n{said}")
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> None:
    """Set up everything; kernels that nvcc cannot compile here are compiled when they are used."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--environment", type=Path, required=True)
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install")
    parser.add_argument("--kernels", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    environment = args.environment.resolve()
    if args.kernels:
        print(compile_kernels(environment, architecture()), "kernels' files of machine code")
        return
    make(environment)
    install(environment, args.wheels)
    print(f"{environment}: pydtnn is there")
    again = [str(python_of(environment)), "-m", "tests.gpu_check.setup"]
    again += ["--environment", str(environment), "--kernels"]
    try:
        print(run(*again).strip())
    except RuntimeError as error:
        print(f"gpu_setup: {error}\nCUDA kernels will be compiled by NVRTC when they are used")


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as problem:
        sys.exit(f"gpu_setup: {problem}")
