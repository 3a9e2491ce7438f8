"""What is known of each version of an engine: its flags, and the combinations it refuses or rewrites, with sources.

One file per engine and version, `ENGINE-VERSION.yaml`. A rule holds where every condition of its `when` does:

    - setting: attention_backend
      when: {topk: {above: 1}, attention_backend: [trtllm_mha]}
      says: trtllm_mha verifies chains only (topk 1)
      source: srt/arg_groups/speculative_hook.py 1176

Besides settings a rule may ask for facts: `gpus.*` (`Fabric.facts`), and `model.*` and `draft.*` (`drafts.attention`);
where nothing is known of one, the rule does not hold. A condition is a list (one of these), `{above: n}`, `{below: n}`,
`{not: [...]}` or `{given: true}`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

import yaml

from tuner.engines.drafts import MODEL_FACTS

CONDITIONS = ("above", "below", "not", "given")


@dataclass(frozen=True)
class Rule:
    """A combination that this version refuses or rewrites. `setting` is the one to blame."""

    setting: str
    when: Mapping[str, Any]
    says: str
    source: str

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether the settings are such a combination."""
        return all(_holds(condition, values.get(name)) for name, condition in self.when.items())


@dataclass(frozen=True)
class Known:
    """One version. `flags` are those of its command line, in long and short form."""

    engine: str
    version: str
    source: str
    flags: frozenset[str]
    rules: tuple[Rule, ...]

    def problems(self, values: Mapping[str, Any]) -> list[str]:
        """A sentence for each rule that holds."""
        return [f"{rule.setting}: {rule.says}" for rule in self.rules if rule.holds(values)]

    def of_model(self, values: Mapping[str, Any]) -> list[str]:
        """A sentence for each rule that asks for what the model is, and holds."""
        mine = [rule for rule in self.rules if not MODEL_FACTS.isdisjoint(rule.when)]
        return [f"{rule.setting}: {rule.says}" for rule in mine if rule.holds(values)]


def _holds(condition: Any, value: Any) -> bool:
    if isinstance(condition, list):
        return any(value == one and type(value) is type(one) for one in condition)
    for word, wanted in condition.items():
        number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
        if word == "given":
            good = (value is not None) is wanted
        elif word == "not":
            good = value is not None and value not in wanted
        else:
            good = number is not None and (number > wanted if word == "above" else number < wanted)
        if not good:
            return False
    return True


@lru_cache
def known(engine: str) -> dict[str, Known]:
    """Version → what is known of it, oldest first."""
    found = {}
    for entry in files(__package__).iterdir():
        kind, _, version = entry.name.removesuffix(".yaml").partition("-")
        if kind == engine and entry.name.endswith(".yaml"):
            found[version] = _load(engine, version, yaml.safe_load(entry.read_text(encoding="utf-8")))
    return dict(sorted(found.items(), key=lambda pair: numbers(pair[0])))


def _load(engine: str, version: str, data: Mapping[str, Any]) -> Known:
    rules = tuple(Rule(**rule) for rule in data["rules"])
    return Known(engine, version, data["source"], frozenset(data["flags"].split()), rules)


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, for comparison."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def nearest(engine: str, version: str | None) -> tuple[Known, str | None]:
    """What is known of a version, or of the one nearest to it; then also a sentence that says so.

    Args:
        version: None or without numbers where it cannot be told: the newest known counts.
    """
    versions = known(engine)
    wanted = numbers(version or "")
    if not wanted:
        newest = list(versions.values())[-1]
        return newest, f"the version of {engine} cannot be told; the rules of {newest.version} are used"
    for number, data in versions.items():
        if not any(_distance(numbers(number), wanted)):
            return data, None
    close = min(versions.values(), key=lambda data: _distance(numbers(data.version), wanted))
    return close, f"{engine} {version} is not known; the rules of {close.version}, the nearest, are used"


def _distance(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    pairs = zip((*one, 0, 0, 0), (*other, 0, 0, 0), strict=False)
    return tuple(abs(a - b) for a, b in list(pairs)[:3])
