"""YAML whose strings are strings for every reader: what any YAML might take for something else stands in quotes."""

from __future__ import annotations

import re
from typing import Any

import yaml

_BARE = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*(?: [A-Za-z0-9_./-]+)*")
_WORDS = frozenset(["y", "n", "yes", "no", "on", "off", "true", "false", "null", "none", "inf", "nan"])
"""Words that one or another version of YAML reads as something else."""


class _Dumper(yaml.SafeDumper):
    """Block style, lists indented under their key."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """See `yaml.emitter`."""
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        """Everything is written where it stands."""
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    bare = _BARE.fullmatch(value) and value.lower() not in _WORDS
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if bare else '"')


_Dumper.add_representer(str, _text)


def dump(value: Any) -> str:
    """A document. Keys keep their order; no line is folded."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**30)
