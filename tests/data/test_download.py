from __future__ import annotations

import functools
import gc
import hashlib
import http.server
import io
import sys
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pydtnn.data import load_cifar10, load_mnist
from pydtnn.data.download import SourceFile, fetch

# pooch leaves the answer to a request that failed open until it is collected.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """A folder, and the address at which it is served to this machine."""
    pytest.importorskip("pooch")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    folder = tmp_path / "site"
    folder.mkdir()
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
    gc.collect()


def publish(site: tuple[Path, str], name: str, content: bytes) -> SourceFile:
    (site[0] / name).write_bytes(content)
    return SourceFile(f"{site[1]}/{name}", hashlib.sha256(content).hexdigest(), "set")


def tar(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(f"../some/folder/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def test_a_file_is_fetched_whole_and_named_members_of_an_archive_wherever_it_wants_them(
    tmp_path, site
):
    source = publish(site, "all.tar.gz", tar(a=b"1", b=b"2", evil=b"3"))
    sources = [replace(source, members=("a", "b")), publish(site, "c.gz", b"content")]
    fetch("it", sources, tmp_path / "data")
    found = {path.name: path.read_bytes() for path in (tmp_path / "data" / "set").iterdir()}
    assert found == {"a": b"1", "b": b"2", "c.gz": b"content"}
    assert not list(tmp_path.rglob("evil"))


@pytest.mark.parametrize("wrong", ["sha256", "url", "members"])
def test_a_download_that_fails_is_told_in_one_sentence_and_leaves_nothing(tmp_path, site, wrong):
    source = publish(site, "all.tar.gz", tar(a=b"1"))
    values = {"sha256": "0" * 64, "url": f"{source.url}/missing", "members": ("a", "missing")}
    source = replace(source, **{wrong: values[wrong]})
    with pytest.raises(OSError, match=r"it: could not download http.* download it by") as error:
        fetch("it", [source], tmp_path / "data")
    assert "\n" not in str(error.value)
    assert not [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
    (tmp_path / "file").touch()  # in the place of a folder
    with pytest.raises(OSError, match="could not download"):
        fetch("it", [publish(site, "a", b"")], tmp_path / "file")


def test_without_pooch_the_way_to_get_it_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    for load in (load_mnist, load_cifar10):
        with pytest.raises(ImportError, match=r"--download requires pooch; .* pip install pooch"):
            load(data_dir=tmp_path, download=True)
