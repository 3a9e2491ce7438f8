"""docs/failures.md says what is true: the classes are those of the code, and the tests that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

from tuner.launch.kinds import table

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "failures.md").read_text()


def test_the_classes_are_those_of_the_code() -> None:
    begin, end = "<!-- kinds: written by tuner.launch.kinds.table -->\n", "\n<!-- end of kinds -->"
    assert PAGE[PAGE.index(begin) + len(begin) : PAGE.index(end)] == table()


def test_every_test_that_is_named_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    there = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^\s*(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert len(named) > 60
    assert sorted(named - there) == []
