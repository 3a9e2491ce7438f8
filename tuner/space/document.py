"""A YAML file as plain values that remember their lines.

Scalars are read by the rules of YAML 1.2: only `true` and `false` are booleans, so `on`, `off`, `yes` and `no` stay
the words that engines take them for; `1e3` is a number; `1:30` and dates are text. A key given twice is a problem
instead of a silent loss.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from tuner.space.problems import Problem, SpaceProblems

Path = tuple[str | int, ...]

MAX_BYTES = 1_000_000
MAX_NODES = 50_000
"""Aliases of aliases multiply: a few lines can stand for billions of values."""
_NULL = re.compile(r"null|Null|NULL|~|")
_TRUE = re.compile(r"true|True|TRUE")
_FALSE = re.compile(r"false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_OCTAL = re.compile(r"0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")


@dataclass
class Document:
    """Plain values and where each of them stands. `source` is what messages call the file."""

    source: str
    value: Any
    lines: dict[Path, int]
    problems: list[Problem] = field(default_factory=list)
    nodes: int = 0

    def line(self, path: Path) -> int:
        """The line of the longest known beginning of `path`; 0 where nothing of it stands in the file."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.lines:
                return self.lines[path[:end]]
        return 0


def read_document(text: str, source: str) -> Document:
    """The document that `text` writes.

    Raises:
        SpaceProblems: it is not YAML; with the line.
    """
    if len(text) > MAX_BYTES:
        raise SpaceProblems(source, [Problem(0, "", f"the file is larger than {MAX_BYTES // 1_000_000} MB")])
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 0
        raise SpaceProblems(source, [Problem(line, "", _yaml_hint(error, text, line))]) from None
    except (yaml.YAMLError, RecursionError) as error:
        raise SpaceProblems(source, [Problem(0, "", f"not YAML: {str(error) or type(error).__name__}")]) from None
    document = Document(source, None, {})
    if root is not None:
        document.value = _plain(root, (), document, [])
    return document


def parse_scalar(text: str) -> Any:
    """The value of a plain scalar, by the rules of YAML 1.2."""
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text):
        return True
    if _FALSE.fullmatch(text):
        return False
    if _INT.fullmatch(text):
        return int(text) if len(text) <= 30 else text
    if _HEX.fullmatch(text):
        return int(text, 16)
    if _OCTAL.fullmatch(text):
        return int(text[2:], 8)
    if _FLOAT.fullmatch(text):
        number = float(text)
        return number if math.isfinite(number) else text
    return text


def _yaml_hint(error: yaml.MarkedYAMLError, text: str, line: int) -> str:
    lines = text.splitlines()
    here = lines[line - 1] if 0 < line <= len(lines) else ""
    indent = here[: len(here) - len(here.lstrip())]
    if "\t" in indent or "'\\t'" in (error.problem or ""):
        return "YAML does not allow tabs for indentation; use spaces"
    return f"not YAML: {error.problem or error.context}"


def _plain(node: yaml.Node, path: Path, document: Document, above: list[yaml.Node]) -> Any:
    document.lines.setdefault(path, node.start_mark.line + 1)
    document.nodes += 1
    if document.nodes > MAX_NODES:
        line = node.start_mark.line + 1
        raise SpaceProblems(document.source, [Problem(line, "", f"the file holds more than {MAX_NODES} values")])
    if any(node is parent for parent in above):
        document.problems.append(Problem(node.start_mark.line + 1, _dotted(path), "an alias refers to itself"))
        return None
    if isinstance(node, yaml.ScalarNode):
        return parse_scalar(node.value) if node.style is None else node.value  # quoted: text
    if isinstance(node, yaml.SequenceNode):
        return [_plain(child, (*path, i), document, [*above, node]) for i, child in enumerate(node.value)]
    assert isinstance(node, yaml.MappingNode)
    return _mapping(node, path, document, [*above, node])


def _mapping(node: yaml.MappingNode, path: Path, document: Document, above: list[yaml.Node]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            document.problems.append(Problem(line, _dotted(path), "a key must be a plain word"))
            continue
        key = key_node.value
        if key in result:
            first = document.lines[(*path, key)]
            document.problems.append(Problem(line, _dotted((*path, key)), f"given twice; first on line {first}"))
            continue
        document.lines[(*path, key)] = line
        result[key] = _plain(value_node, (*path, key), document, above)
    return result


def _dotted(path: Path) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


dotted = _dotted
"""A path as a person writes it: `parameters.topk.choices[2]`."""
