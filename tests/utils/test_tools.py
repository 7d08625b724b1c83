"""What packages register for the library."""

from importlib.metadata import EntryPoint

import pytest

from pydtnn.tools import interchange
from pydtnn.utils import tools
from pydtnn.utils.tools import GROUP, find_tool


def test_a_tool_is_what_a_package_registers(monkeypatch):
    assert find_tool("state_dicts") is interchange
    entry = EntryPoint("another", "math:gcd", GROUP)
    monkeypatch.setattr(tools, "entry_points", lambda **_: [entry])
    find_tool.cache_clear()
    assert find_tool("another")(4, 6) == 2
    find_tool.cache_clear()


@pytest.mark.parametrize("missing", [[], [EntryPoint("draw", "pydtnn.absent", GROUP)]])
def test_a_tool_that_is_not_installed_is_none_or_an_error(missing, monkeypatch):
    monkeypatch.setattr(tools, "entry_points", lambda **_: missing)
    assert find_tool("draw") is None
    with pytest.raises(ValueError, match="--draw requires the tools of pydtnn"):
        find_tool("draw", "train: --draw")
