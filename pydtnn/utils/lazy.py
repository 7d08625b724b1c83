"""Packages that import their names when they are used (PEP 562)."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType, ModuleType
from typing import Any

from pydtnn.utils.names import module_getattr


@cache
def homes(package: str) -> dict[str, str]:
    """Return the module of each name that a package imports under ``if TYPE_CHECKING:``."""
    loader: Any = sys.modules[package].__spec__.loader  # type: ignore[union-attr]
    return {
        alias.asname or alias.name: str(node.module)
        for guard in ast.parse(loader.get_source(package)).body
        if isinstance(guard, ast.If) and getattr(guard.test, "id", "") == "TYPE_CHECKING"
        for node in guard.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def lazy(package: str, tools: Mapping[str, str] = MappingProxyType({})) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package, for those names and as `module_getattr`.

    What type checkers read is thus what is imported.

    Parameters
    ----------
    package : str
    tools : mapping of str to str
        Further names, and the tools that contain them: see `pydtnn.utils.tools`.
    """
    sys.modules[package].__class__ = LazyPackage
    find = module_getattr(package, homes(package))

    def __getattr__(name: str) -> Any:
        if name not in tools:
            return find(name)
        from pydtnn.utils.tools import find_tool  # it takes longer than all other imports

        return getattr(find_tool(tools[name], f"{package.partition('.')[2]}.{name}"), name)

    return __getattr__


class LazyPackage(ModuleType):
    """A package of which a name is the same as that of the module that defines it, as ``gpt``."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and name in homes(self.__name__):
            value = getattr(value, name)  # Python would assign the module after its import
        super().__setattr__(name, value)


class Named(Mapping[str, Any]):
    """Members of a package by other names, such as those on the command line.

    Parameters
    ----------
    package : str
    members : mapping of str to str, or sequence of str
        Names of members by other names, or those that have no other one.
    """

    def __init__(self, package: str, members: Mapping[str, str] | Sequence[str]) -> None:
        self.package = package
        if not isinstance(members, Mapping):
            members = {name: name for name in members}
        self.members = members

    def __getitem__(self, name: str) -> Any:
        return getattr(sys.modules[self.package], self.members[name])

    def __contains__(self, name: object) -> bool:
        return name in self.members

    def __iter__(self) -> Iterator[str]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)
