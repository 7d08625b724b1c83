"""Options of an earlier run, for ``--resume FOLDER``."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from pydtnn.cli.config import TrainConfig
from pydtnn.cli.mesh import read_axes
from pydtnn.cli.options import flags
from pydtnn.cli.run_directory import RUNS
from pydtnn.training.checkpoint import find_checkpoints, read_configuration
from pydtnn.utils import plain_yaml
from pydtnn.utils.files import read_file
from pydtnn.utils.suggest import some

RUN_FILE = "run.json"

TRACE = ("trace", "trace_steps", "trace_kernels")

NOT_KEPT = ("resume", "output_dir", "evaluate_only", "progress", "verbose", "quiet", *TRACE)
"""Options that are not taken from the earlier run: each command sets its own."""

INITIAL = ("load", "load_options")
"""Options of the weights to start from, which a checkpoint replaces."""


OF_THE_MESH = ("parallel", "plan", "micro_batches", "pipeline_schedule")
"""Options that refer to axes of a run's mesh, and are not kept on another one."""


class Run(NamedTuple):
    """An earlier run.

    Attributes
    ----------
    folder : str
    options : dict
        Its configuration, without the options in `NOT_KEPT`.
    ranks, global_batch_size : int
        0 if they are unknown.
    """

    folder: str
    options: dict[str, Any]
    ranks: int = 0
    global_batch_size: int = 0


def read_run(folder: str) -> Run:
    """Read the options of a run from its run.json, or from its newest checkpoint.

    Raises
    ------
    ValueError, OSError
        If the folder contains no run, or the file is damaged or from another version.
    """
    path = Path(folder)
    if not _is_run(path):
        raise ValueError(f"train: --resume: {_no_run(path)}")
    checkpoints = find_checkpoints(path)
    content: dict[str, Any] = {}
    if (path / RUN_FILE).is_file():
        content = _read_run_file(path / RUN_FILE)
        options = content.get("configuration")
    else:
        options = read_configuration(checkpoints[-1])
    advice = f"set the options of the run, and --output-dir {folder} --resume"
    if not isinstance(options, dict) or not options:
        raise ValueError(f"train: --resume: {folder} contains no options of a run; {advice}")
    for name in options:
        if name not in flags(TrainConfig):
            raise ValueError(
                f"train: --resume: the run in {folder} has the option {name!r} of another version; "
                + advice
            )
    options = {name: value for name, value in options.items() if name not in NOT_KEPT}
    if checkpoints:
        options = {name: value for name, value in options.items() if name not in INITIAL}
    ranks, batch = (content.get(name) for name in ("ranks", "global_batch_size"))
    known = type(ranks) is int and type(batch) is int
    return Run(folder, options, *((ranks, batch) if known else ()))


def start_values(run: Run, given: set[str], ranks: int) -> dict[str, Any]:
    """Return the values of options that continue a run.

    Parameters
    ----------
    run : Run
    given : set of str
        Names of the options that the user has set, which override those of the run.
    ranks : int
        Number of ranks that continue it. If it is another one, or they form another mesh, the
        global batch size is kept, and mesh and plan of the run are not.
    """
    values = {**run.options, "resume": True, "output_dir": run.folder}
    mesh = read_axes(str(values.get("parallel") or ""))
    other = run.ranks not in (0, ranks) or "parallel" in given
    if "parallel" in given or prod(mesh.values()) != ranks:
        for name in OF_THE_MESH:
            values.pop(name, None)
    if "batch_size" in given:
        values.pop("global_batch_size", None)  # it would replace the batch size
    elif other and run.global_batch_size:
        values["global_batch_size"] = run.global_batch_size
    return values


def describe_changes(run: Run, config: TrainConfig) -> str:
    """Return the options that differ from those of the run: "--epochs 4 -> 8"; empty if none.

    An option without a value is shown as "none".
    """
    usual = flags(TrainConfig)
    return ", ".join(
        f"{own.label} {_show(before)} -> {_show(now)}"
        for name, own in usual.items()
        if name not in (*NOT_KEPT, *INITIAL)
        and (before := run.options.get(name, own.default)) != (now := getattr(config, name))
    )


def _show(value: Any) -> str:
    return "none" if value is None else plain_yaml.dump(value)


def _is_run(path: Path) -> bool:
    return (path / RUN_FILE).is_file() or bool(find_checkpoints(path))


def _no_run(path: Path) -> str:
    """Return why a folder contains no run, with the runs beside it, newest first."""
    if path.is_file():
        return f"expected the folder of a run, got the file {path}; --load reads a file of weights"
    if _is_run(path.parent) and path.name.startswith("checkpoint-"):
        return f"expected the folder of a run, got the checkpoint {path}; use {path.parent}"
    missing = "contains no run" if path.is_dir() else "does not exist"
    for place in (path, path.parent, RUNS):
        if runs := _runs_in(place):
            return f"{path} {missing}; use one of the runs in {place}, newest first: {some(runs)}"
    return f"{path} {missing}; name the folder of a run, such as {RUNS / 'resnet44-cifar10-1'}"


def _runs_in(place: Path) -> list[str]:
    """Return the paths of the runs in a folder, newest first."""
    found = []
    try:
        for path in place.iterdir():
            if path.is_dir() and _is_run(path):
                file = path / RUN_FILE
                found.append(((file if file.is_file() else path).stat().st_mtime, str(path)))
    except OSError:
        return []
    return [name for _, name in sorted(found, reverse=True)]


def _read_run_file(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_file("train: --resume", file))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"train: --resume: {file} cannot be parsed; set the options of the run, and "
            f"--output-dir {file.parent} --resume"
        ) from error
    return content if isinstance(content, dict) else {}
