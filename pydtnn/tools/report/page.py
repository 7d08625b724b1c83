"""The page: sections, the styles and scripts of this package, and Plotly, in one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from pydtnn.tools.report.curves import throughput, training
from pydtnn.tools.report.layers import layers
from pydtnn.tools.report.memory import memory
from pydtnn.tools.report.messages import messages
from pydtnn.tools.report.overview import configuration, environment, overview
from pydtnn.tools.report.predicted import predicted
from pydtnn.tools.report.runs import RunView
from pydtnn.tools.report.scaling import scaling
from pydtnn.tools.report.section import Section
from pydtnn.tools.report.steps import phases, steps
from pydtnn.tools.report.timeline import timeline
from pydtnn.utils.imports import import_optional
from pydtnn.utils.version import __version__

TEMPLATES = Path(__file__).parent / "templates"


def sections_of(runs: Sequence[RunView]) -> list[Section]:
    """Return the sections of runs, in the order of the page."""
    builders = (overview, scaling, training, throughput, predicted, phases, steps, timeline, layers)
    return [build(runs) for build in (*builders, messages, memory, configuration, environment)]


def render(runs: Sequence[RunView]) -> str:
    """Return the page of runs as HTML that refers to no other file.

    Parameters
    ----------
    runs : sequence of Run

    Raises
    ------
    ImportError
        If Jinja2 is not installed, with the command that installs it.
    """
    jinja2 = import_optional("jinja2", "jinja2", "report")
    sections = sections_of(runs)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        title=title(runs),
        sections=[section for section in sections if not section.empty],
        absent=[section for section in sections if section.empty],
        plotly=(TEMPLATES / "plotly-basic.min.js").read_text(),
        styles=(TEMPLATES / "page.css").read_text(),
        script=(TEMPLATES / "page.js").read_text(),
        version=__version__,
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    )


def title(runs: Sequence[RunView]) -> str:
    """Return the title: model and data of a run, or the number of runs."""
    if len(runs) > 1:
        return f"Comparison of {len(runs)} runs"
    options = runs[0].configuration
    names = [str(options[name]) for name in ("model", "dataset") if name in options]
    return " on ".join(names) or runs[0].label
