"""Download of the files of a data set, with checksums (using pooch)."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydtnn.utils.optional import import_optional


@dataclass(frozen=True)
class Source:
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


def fetch(dataset: str, sources: Sequence[Source], root: Path) -> None:
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
