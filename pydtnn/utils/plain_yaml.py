"""Reader and writer for the subset of YAML that configurations use.

Values have the types of YAML 1.2's core schema, so that ``12:30:00`` is text and not 45000, and
quoted values are text. ``yes``, ``no``, ``on`` and ``off`` are booleans too, as in YAML 1.1.
Duplicate keys, aliases, tags and keys that are not text raise ValueError.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

MAX_DEPTH = 50
"""Maximum nesting depth of lists and mappings."""

MAX_B = 1 << 19
"""Largest document, in B, which takes seconds to parse."""

_CONSTANTS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"), True),
    **dict.fromkeys(("false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"), False),
}
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_ZEROS = re.compile(r"[-+]?0[0-9]+")
_SPECIAL = re.compile(r"([-+]?)\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")

_MAX_NUMBER_LENGTH = 300
"""Maximum length of a number, in characters; longer words are text."""

_PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")}


class _Loader(yaml.BaseLoader):
    """Loader of nodes; raises for aliases, which may refer to themselves."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _refused("aliases are not supported; repeat the value", event)
        if self.depth > MAX_DEPTH:
            raise _refused(f"nesting is deeper than {MAX_DEPTH} levels", event)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def load(text: str) -> Any:
    """Return the value of a YAML document; None for an empty one.

    Raises
    ------
    ValueError
        If the text is not valid YAML or uses an unsupported feature.
    """
    try:
        node = yaml.compose(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        if mark is None:
            raise ValueError(" ".join(str(error).split())) from error
        raise ValueError(f"{error.problem} (line {mark.line + 1})") from error
    return None if node is None else _value(node)


def scalar(text: str) -> Any:
    """Return the value of an unquoted scalar.

    >>> scalar("3"), scalar("1e-3"), scalar("12:30:00"), scalar("null")
    (3, 0.001, '12:30:00', None)
    """
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if len(text) <= _MAX_NUMBER_LENGTH:
        if _INT.fullmatch(text):
            return int(text, 0)
        if _FLOAT.fullmatch(text) and not _ZEROS.fullmatch(text):
            return float(text)
        if special := _SPECIAL.fullmatch(text):
            return float("nan" if special[1] is None else special[1] + "inf")
    return text


def dump(value: Any) -> str:
    """Write a value on one line so that `load` returns it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "{" + ", ".join(f"{dump(k)}: {dump(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(dump, value)) + "]"
    if isinstance(value, float):
        special = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}
        return special.get(repr(value), repr(value))
    if isinstance(value, int):
        return str(value)
    if re.fullmatch(r"[A-Za-z_][\w./-]*", value, re.ASCII) and scalar(value) == value:
        return value
    return '"' + "".join(map(_quoted, value)) + '"'


def _quoted(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    return character if character.isprintable() else f"\\U{ord(character):08x}"


def _value(node: yaml.Node) -> Any:
    if node.tag not in _PLAIN_TAGS:
        raise _refused(f"the tag {node.tag} is not supported; remove it", node)
    if isinstance(node, yaml.ScalarNode):
        return scalar(node.value) if node.style is None else node.value
    if isinstance(node, yaml.SequenceNode):
        return [_value(item) for item in node.value]
    mapping: dict[str, Any] = {}
    for name, item in node.value:
        key = _value(name)
        if not isinstance(key, str):
            raise _refused("a key must be text; quote it", name)
        if key in mapping:
            raise _refused(f"key {key!r} occurs twice; remove one of them", name)
        mapping[key] = _value(item)
    return mapping


def _refused(why: str, place: Any) -> ValueError:
    return ValueError(f"{why} (line {place.start_mark.line + 1})")
