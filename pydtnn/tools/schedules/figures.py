"""Figures that Matplotlib draws, as files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from pydtnn.utils.files import write_file
from pydtnn.utils.imports import import_optional

FORMATS = (".png", ".pdf", ".svg")
"""Ends of the names of files."""

STYLE: Mapping[str, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "pdf.fonttype": 42,  # fonts as vectors that editors and publishers accept
    "svg.fonttype": "none",  # text as text
    "svg.hashsalt": "pydtnn",  # equal figures are equal files
}
"""Properties of Matplotlib in all figures."""

PALETTE = ("#3470b5", "#6a5cc0", "#a94fae", "#cf4a75", "#d9693a", "#cf9a1f", "#7fa52f", "#2a9a7c")
INK, QUIET, BAND, LINE = "#222222", "#777777", "#f4f4f1", "#d8d8d2"

_NO_DATE = {".png": {}, ".pdf": {"CreationDate": None}, ".svg": {"Date": None}}


def check_figure(who: str, path: str | Path) -> Any:
    """Return the module `matplotlib`; raise as `save_figure` does if there can be no such file."""
    path = Path(path)
    if path.suffix not in FORMATS:
        raise ValueError(
            f"{who}: the file name must end in one of {', '.join(FORMATS)}, got {path}"
        )
    import_optional("matplotlib.figure", "matplotlib", who)
    return import_optional("matplotlib", "matplotlib", who)


def save_figure(
    who: str,
    path: str | Path,
    draw: Callable[[Any], Any],
    *,
    dpi: float = 200,
) -> None:
    """Draw a figure into a file; equal figures are equal files.

    Parameters
    ----------
    who : str
        What errors begin with.
    path : str or Path
        Its name ends in one of `FORMATS`.
    draw : callable
        Receives the class `matplotlib.figure.Figure` and returns a figure.
    dpi : float, default 200
        Pixels per inch of a PNG file.

    Raises
    ------
    ImportError
        If Matplotlib is not installed.
    OSError
        If the file cannot be written.
    ValueError
        If the kind of file is not supported.
    """
    path, matplotlib = Path(path), check_figure(who, path)
    content = BytesIO()
    with matplotlib.rc_context(STYLE):
        figure = draw(matplotlib.figure.Figure)
        figure.savefig(content, format=path.suffix[1:], dpi=dpi, metadata=_NO_DATE[path.suffix])
    write_file(who, path, content.getvalue())
