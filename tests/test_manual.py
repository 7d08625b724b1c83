"""The pages that `make docs` has built are complete, have no broken links, and work offline."""

from __future__ import annotations

import json
import os
import re
import sys
import zlib
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.test_imports import ROOT

DOCS = ROOT / "docs"
BUILT = ROOT / os.environ.get("PYDTNN_MANUAL", "nowhere")

pytestmark = pytest.mark.skipif(
    not BUILT.exists(), reason="`make docs` builds the manual and runs these tests"
)


class Page(HTMLParser):
    """The anchors of a page, its links, and what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values.get("id", ""), values.get("name", "")}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in ("img", "script") and "src" in values:
            self.loaded.append(values["src"])
        if tag == "link" and values.get("rel") != "canonical":
            self.loaded.append(values["href"])


@cache
def pages() -> dict[Path, Page]:
    return {path: Page(path) for path in BUILT.rglob("*.html")}


def test_no_link_within_the_manual_is_broken():
    broken = []
    for path, page in pages().items():
        for link in page.links:
            target, _, anchor = link.partition("#")
            if re.match(r"\w+:", link):
                continue
            file = (path.parent / target).resolve() if target else path
            known = pages()[file].ids if file in pages() else {anchor}
            if not file.exists() or (anchor and anchor not in known):
                broken.append(f"{path.relative_to(BUILT)}: {link}")
    assert not broken


def test_links_to_other_sites_have_the_form_of_an_address():
    links = {link for page in pages().values() for link in page.links if re.match(r"\w+:", link)}
    assert links
    assert [
        x for x in links if not re.fullmatch(r"https://[\w.-]+\.[a-z]{2,}(/[^\s<>\"]*)?", x)
    ] == []


def test_the_manual_loads_nothing_from_other_sites():
    loaded = {file for page in pages().values() for file in page.loaded}
    assert [file for file in loaded if re.match(r"(\w+:)?//", file)] == []


def test_every_page_is_in_the_index_of_the_search():
    index = (BUILT / "searchindex.js").read_text()
    assert index.startswith("Search.setIndex(")  # loaded as a script, which works for file://
    names = set(json.loads(re.findall(r'"?docnames"?:(\[.*?\])', index)[0]))
    sources = {*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb"), *DOCS.rglob("*.rst")}
    assert {path.relative_to(DOCS).with_suffix("").as_posix() for path in sources} <= names


def test_no_public_name_is_missing_in_the_reference(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    import reference

    monkeypatch.delitem(sys.modules, "reference")
    content = (BUILT / "objects.inv").read_bytes().split(b"\n", 4)[4]
    lines = zlib.decompress(content).decode().splitlines()
    documented = {line.split()[0] for line in lines if " py:" in line}
    public = {f"{module}.{name}" for module, names in reference.modules().items() for name in names}
    assert len(public) > 500
    assert public - documented == set()
