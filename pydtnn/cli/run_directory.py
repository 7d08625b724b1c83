"""The folder of a run: created and tested before training, and read by `--resume`."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from pydtnn.cli.config import REMOVED, TrainConfig, flags, read_axes
from pydtnn.comm import Communicator
from pydtnn.comm.agree import on_rank_0
from pydtnn.saving import check_replaceable
from pydtnn.training.callback import Callback, Training
from pydtnn.training.checkpoint import find_checkpoints, read_configuration, tidy
from pydtnn.training.run_folder import (
    BEST_FILE,
    HISTORY_FILE,
    MODEL_FILE,
    RUN_FILE,
    find_runs,
    is_run,
    read_about,
)
from pydtnn.utils import plain_yaml
from pydtnn.utils.files import remove_unfinished, unwritable
from pydtnn.utils.names import shorten

RUNS = Path("runs")
"""Parent of the folders of runs without `--output-dir`."""

FILES = (RUN_FILE, "history.csv", HISTORY_FILE, MODEL_FILE, BEST_FILE)
"""Files that a run writes besides checkpoints."""


@contextlib.contextmanager
def run_directory(
    config: TrainConfig, comm: Communicator, again: Path | None = None
) -> Iterator[Path]:
    """Create the folder of the run and test that it is writable.

    Collective: all ranks call it; rank 0 creates and tests. Without `--output-dir` the folder is
    the first free one of ``runs/MODEL-DATASET-1``, ``-2``, ...; runs that start simultaneously get
    different ones. A folder that is empty at the end is removed. No folder is created for
    `--evaluate-only`.

    Parameters
    ----------
    config : TrainConfig
    comm : Communicator
    again : Path, optional
        The folder, if it is that of this run already, which continues after ranks have failed.

    Raises
    ------
    AgreedError
        On all ranks, if the folder or that of `--save` is not writable, if another run is writing
        there, or if it contains checkpoints of another run and `--resume` is not set. At the end,
        if the folder is another one, as it was removed or renamed.
    """
    made: list[Path] = []
    with contextlib.ExitStack() as held:
        try:
            path = comm.gather_object(on_rank_0(comm, _prepare, config, made, held, again))[0]
            identity = _identity(path) if comm.rank == 0 else None
            yield path
            on_rank_0(comm, _require_same, path, identity)
        finally:
            remove_empty(made)


def _prepare(
    config: TrainConfig, made: list[Path], held: contextlib.ExitStack, again: Path | None
) -> Path:
    """Return the folder of the run, locked until `held` is closed.

    Folders that are created are appended to `made`, innermost first.
    """
    if config.save:
        save = Path(config.save)
        if not config.saves_weights:
            check_replaceable("train: --save", save)
        elif save.is_dir():
            raise ValueError(
                f"train: --save: expected a file, got the folder {save}; name a file in it"
            )
        make_folder("train: --save", save.parent, made)
    if config.evaluate_only:
        return Path(config.output_dir or ".")
    if config.output_dir is None and again is None:
        return take_free_folder(config, made, held)
    path = again or Path(config.output_dir or ".")
    make_folder("train: --output-dir", path, made)
    claim(path, held)
    if not config.resume and again is None and find_checkpoints(path):
        raise ValueError(
            f"train: --output-dir: {path} contains checkpoints of an earlier run; add --resume to "
            "continue it, or choose another folder"
        )
    return path


def remove_unfinished_files(path: Path) -> None:
    """Remove what killed runs have left, unless the folder of this run cannot be locked."""
    with contextlib.ExitStack() as held:
        try:
            claim(path, held)
        except BlockingIOError:  # locked, so that no other run is writing
            tidy(path)
            remove_unfinished(path, FILES)


def claim(path: Path, held: contextlib.ExitStack) -> None:
    """Lock the folder against other runs until `held` is closed or this process ends.

    A batch system may restart a run while the first one is still active. On network file systems
    that cannot lock a folder, other runs are not detected.
    """
    descriptor = os.open(path, os.O_RDONLY)
    held.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(
            f"train: --output-dir: another run is writing in {path}; wait until it ends, or choose "
            "another folder"
        ) from None
    except OSError:
        pass


def _identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a folder, to detect that it was replaced; None if it is absent."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _require_same(path: Path, identity: tuple[int, int] | None) -> None:
    if _identity(path) != identity:
        raise FileNotFoundError(
            f"train: --output-dir: {path} was removed or renamed while the run was writing in it; "
            "files written before that are missing from it"
        )


class RunFolder(Callback):
    """Begin to write in the folder of a run when nothing refuses the training any more.

    Parameters
    ----------
    directory : Path
        Folder of the run.

    Attributes
    ----------
    begin : callable
        Called on rank 0.
    """

    reads_gradients = False

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.begin: Callable[[], object] = lambda: None

    def on_fit_ready(self, trainer: Training, epochs: int, steps: int) -> None:
        """Remove unfinished files of killed runs, and begin. Collective: all ranks call it."""
        on_rank_0(trainer.comm, remove_unfinished_files, self.directory)
        on_rank_0(trainer.comm, self.begin)


def take_free_folder(config: TrainConfig, made: list[Path], held: contextlib.ExitStack) -> Path:
    """Create the first free folder of ``runs/MODEL-DATASET-1``, ``-2``, ..., and lock it.

    Parameters
    ----------
    config : TrainConfig
    made : list of Path
        Folders that are created are appended, innermost first.
    held : ExitStack
        Until it is closed, the folder is locked.
    """
    name = "-".join(Path(of.rpartition(":")[2]).name for of in (config.model, config.dataset))
    number = 1
    while True:
        path = RUNS / f"{name}-{number}"
        if not path.exists():
            with contextlib.suppress(FileExistsError):  # another run has created it
                make_folder("train: --output-dir", path, made, exist_ok=False)
                claim(path, held)
                return path
        number += 1


def make_folder(who: str, path: Path, made: list[Path], *, exist_ok: bool = True) -> None:
    """Create a folder and test that it is writable; append those that are new, innermost first."""
    try:
        new = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=exist_ok)
        made.extend(new)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        if exist_ok:
            raise NotADirectoryError(
                f"{who}: expected a folder, got the file {path}; choose another folder"
            ) from None
        raise
    except OSError as error:
        raise unwritable(who, path, error) from error


def remove_empty(made: Iterable[Path]) -> None:
    """Remove folders that `make_folder` has created and that are empty."""
    for folder in made:
        with contextlib.suppress(OSError):  # usually because it is not empty
            folder.rmdir()


TRACE = ("trace", "trace_steps", "trace_kernels")

NOT_INHERITED = (
    *("resume", "output_dir", "evaluate_only", "progress", "verbose", "quiet", *TRACE, *REMOVED),
)
"""Options that are not taken from the earlier run: each command sets its own."""

INITIAL = ("load", "load_options")
"""Options of the weights to start from, which a checkpoint replaces."""

OF_THE_MESH = ("parallel", "exact_mesh", "plan", "micro_batches", "pipeline_schedule")
"""Options that refer to axes of a run's mesh, and are not kept on another one."""


class EarlierRun(NamedTuple):
    """An earlier run.

    Attributes
    ----------
    folder : str
    options : dict
        Its configuration, without the options in `NOT_INHERITED`.
    ranks, global_batch_size : int
        0 if they are unknown.
    """

    folder: str
    options: dict[str, Any]
    ranks: int = 0
    global_batch_size: int = 0


def read_run(folder: str) -> EarlierRun:
    """Read the options of a run from its run.json, or from its newest checkpoint.

    Raises
    ------
    ValueError, OSError
        If the folder contains no run, or the file is damaged or from another version.
    """
    path = Path(folder)
    if not is_run(path):
        raise ValueError(f"train: --resume: {no_run(path)}")
    checkpoints = find_checkpoints(path)
    advice = f"set the options of the run, and --output-dir {folder} --resume"
    try:
        content = read_about("train: --resume", path)
    except ValueError as error:
        raise ValueError(f"{str(error).partition(';')[0]}; {advice}") from error
    options = content.get("configuration")
    if not (path / RUN_FILE).is_file():
        options = read_configuration(checkpoints[-1])
    if not isinstance(options, dict) or not options:
        raise ValueError(f"train: --resume: {folder} contains no options of a run; {advice}")
    for name, value in options.items():
        if name not in (*flags(TrainConfig), *REMOVED) or (name == "class_balanced" and value):
            raise ValueError(
                f"train: --resume: the run in {folder} has the option {name!r} of another version; "
                + advice
            )
    options = {name: value for name, value in options.items() if name not in NOT_INHERITED}
    if checkpoints:
        options = {name: value for name, value in options.items() if name not in INITIAL}
    ranks, batch = (content.get(name) for name in ("ranks", "global_batch_size"))
    known = type(ranks) is int and type(batch) is int
    return EarlierRun(folder, options, *((ranks, batch) if known else ()))


def start_values(run: EarlierRun, given: set[str], ranks: int) -> dict[str, Any]:
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
    if values.get("dataset") in ("folder", "shards"):
        values.setdefault("exif_rotation", False)  # earlier versions did not turn photographs
    mesh = read_axes(str(values.get("parallel") or ""))
    if values.get("exact_mesh") and "parallel" not in given:
        ranks = run.ranks  # which any number of processes has
    other = run.ranks not in (0, ranks) or "parallel" in given
    if "parallel" in given or prod(mesh.values()) != ranks:
        for name in OF_THE_MESH:
            values.pop(name, None)
    if "batch_size" in given:
        values.pop("global_batch_size", None)  # it would replace the batch size
    elif other and run.global_batch_size:
        values["global_batch_size"] = run.global_batch_size
    return values


def describe_changes(run: EarlierRun, config: TrainConfig) -> str:
    """Return the options that differ from those of the run: "--epochs 4 -> 8"; empty if none.

    An option without a value is shown as "none".
    """
    usual = flags(TrainConfig)
    return ", ".join(
        f"{own.label} {_show(before)} -> {_show(now)}"
        for name, own in usual.items()
        if name not in (*NOT_INHERITED, *INITIAL)
        and (before := run.options.get(name, own.default)) != (now := getattr(config, name))
    )


def _show(value: Any) -> str:
    return "none" if value is None else plain_yaml.dump(value)


def no_run(path: Path) -> str:
    """Return why a folder contains no run, with the runs beside it, newest first."""
    if path.is_file():
        return f"expected the folder of a run, got the file {path}; --load reads a file of weights"
    if is_run(path.parent) and path.name.startswith("checkpoint-"):
        return f"expected the folder of a run, got the checkpoint {path}; use {path.parent}"
    missing = "contains no run" if path.is_dir() else "does not exist"
    for place in (path, path.parent, RUNS):
        if runs := [str(run) for run in find_runs(place)]:
            return (
                f"{path} {missing}; use one of the runs in {place}, newest first: {shorten(runs)}"
            )
    return f"{path} {missing}; name the folder of a run, such as {RUNS / 'resnet44-cifar10-1'}"
