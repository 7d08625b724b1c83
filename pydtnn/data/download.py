"""The folder of a data set, and the download of its files with checksums (using pooch)."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydtnn.utils.files import user_cache
from pydtnn.utils.imports import import_optional

VARIABLE = "PYDTNN_DATA"
"""Environment variable with the path of the data folder."""


@dataclass(frozen=True)
class DiskLayout:
    """One possible layout of a data set on disk.

    Attributes
    ----------
    folders : tuple of str
        Possible folders of the files, relative to the data folder; "." is the data folder itself.
    files : tuple of str
        All files of the data set; each may be gzipped, with ".gz" after its name.
    """

    folders: tuple[str, ...]
    files: tuple[str, ...]


def data_folder(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return `data_dir`, or $PYDTNN_DATA, or pydtnn's folder in the user's cache."""
    chosen = data_dir or os.environ.get(VARIABLE)
    return Path(chosen).expanduser() if chosen else user_cache()


def locate(
    dataset: str,
    layouts: Sequence[DiskLayout],
    data_dir: str | os.PathLike[str] | None = None,
    sources: Sequence[SourceFile] = (),
) -> tuple[int, list[Path]]:
    """Find all files of a data set.

    Parameters
    ----------
    dataset : str
        Name in messages.
    layouts : sequence of Layout
        In order of preference.
    data_dir : path, optional
        See `data_folder`.
    sources : sequence of Source, optional
        Downloaded if files are missing, see `fetch`.

    Returns
    -------
    (int, list of Path)
        The index of the layout, and its files in the order of ``DiskLayout.files``.

    Raises
    ------
    FileNotFoundError
        If files are missing; the message lists them and explains how to get them.
    """
    root = data_folder(data_dir)
    for attempt in (sources, ()):
        for index, layout in enumerate(layouts):
            for folder in layout.folders:
                paths = [_existing(root / folder, file) for file in layout.files]
                found = [path for path in paths if path is not None]
                if len(found) == len(paths):
                    return index, found
        if not attempt:
            break
        fetch(dataset, attempt, root)
    files = " or ".join(", ".join(layout.files) for layout in layouts)
    raise FileNotFoundError(
        f"{dataset}: expected {files} in {root} or its folder {layouts[0].folders[0]}; specify the "
        f"folder that contains them with --data-dir or ${VARIABLE}, or download them with "
        f"--download (load_dataset({dataset!r}, download=True) in a program)"
    )


def _existing(folder: Path, file: str) -> Path | None:
    return next((path for name in (file, f"{file}.gz") if (path := folder / name).is_file()), None)


@dataclass(frozen=True)
class SourceFile:
    """A file to download.

    Attributes
    ----------
    url : str
    sha256 : str
        Checksum of the file, in hexadecimal digits.
    folder : str
        Destination folder, below the data folder.
    members : tuple of str
        For a tar archive the files to extract, by their names without folders; empty for a plain
        file.
    """

    url: str
    sha256: str
    folder: str
    members: tuple[str, ...] = ()


def fetch(dataset: str, sources: Sequence[SourceFile], root: Path) -> None:
    """Download all `sources` to `root`.

    Files are created atomically, also if several ranks download at the same time.

    Raises
    ------
    ImportError
        If pooch is not installed.
    OSError
        If a file cannot be downloaded, does not match its checksum, or cannot be written.
    """
    pooch = import_optional("pooch", "pooch", f"{dataset}: --download")
    pooch.get_logger().setLevel("ERROR")  # a library does not print
    for source in sources:
        folder = root / source.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # A separate directory on the same disk, so that each file can be renamed into place.
            with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as scratch:
                got = Path(pooch.retrieve(source.url, f"sha256:{source.sha256}", path=scratch))
                if source.members:
                    _extract(got, source.members, folder, Path(scratch))
                else:
                    got.replace(folder / source.url.rpartition("/")[2])
        except (OSError, ValueError, tarfile.TarError) as error:
            reason = " ".join(str(error).split())
            raise OSError(
                f"{dataset}: could not download {source.url} to {folder} ({reason}); download "
                f"it by other means and put {'its contents' if source.members else 'it'} there"
            ) from error


def _extract(archive: Path, members: tuple[str, ...], folder: Path, scratch: Path) -> None:
    """Extract only the given files from a tar archive, from any of its folders."""
    wanted = set(members)
    with tarfile.open(archive) as tar:
        for entry in tar:
            name = os.path.basename(entry.name)
            stream = tar.extractfile(entry) if name in wanted and entry.isfile() else None
            if stream is not None:
                with stream, open(scratch / name, "wb") as out:
                    shutil.copyfileobj(stream, out)
    missing = [name for name in members if not (scratch / name).is_file()]
    if missing:
        raise ValueError(f"the archive does not contain {', '.join(missing)}")
    for name in members:
        (scratch / name).replace(folder / name)
