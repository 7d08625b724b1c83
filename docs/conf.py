"""Sphinx's settings for the manual: ``make docs`` builds it in build/docs."""

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))

import reference  # noqa: E402  beside this file

import pydtnn  # noqa: E402

project = "pydtnn"
author = "the pydtnn authors"
copyright = f"{author}, BSD-3-Clause"
version = release = pydtnn.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "numpydoc",
    "sphinx_copybutton",
]
exclude_patterns = ["**/.ipynb_checkpoints"]

# Pages are MyST Markdown; "page.md#heading" is a link, and notebooks show the outputs they store.
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = "off"
highlight_language = "none"
copybutton_prompt_text = "$ "

# Names in single backticks of docstrings are links if the reference has them.
default_role = "py:obj"
autodoc_inherit_docstrings = False  # the passes of layers are documented in Layer
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80
add_module_names = False
toc_object_entries = False  # each name has a heading
numpydoc_show_class_members = False

html_theme = "furo"
html_title = f"pydtnn {version}"
html_static_path = ["_static"]
html_css_files = ["manual.css"]
html_show_search_summary = False  # summaries are fetched, which browsers refuse for file://
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}


def setup(app):
    """Write the pages of the reference before Sphinx reads its sources."""
    app.connect("builder-inited", lambda app: reference.write(DOCS))
    app.connect("autodoc-process-signature", qualify)


def qualify(app, what, name, value, options, signature, returned):
    """Write names of types with their module: several modules have a Schedule or a Timeline."""
    names = vars(sys.modules.get(getattr(value, "__module__", ""), reference))

    def full(match):
        home = reference.homes().get(id(names.get(match[0])))
        return f"~{home}" if home else match[0]

    def write(text):
        return text and re.sub(r"(?<![\w.'\"])[A-Z]\w+", full, text)

    return write(signature), write(returned)
