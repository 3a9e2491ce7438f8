"""The reference of the space file, generated from its schema: `python -m tuner.space.reference > docs/space-file.md`.

Keys, types, limits and defaults are the schema's. Only what a key is for stands here, for a schema cannot know it.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tuner.space import schema

ABOUT: Mapping[str, str] = {
    "name": "of the study, unless `--study` names another",
    "engine": "which server is tuned, and how it is started",
    "engine.kind": "`bundled`, `sglang`, `vllm`, `llama_server`, `command` or `simulated`",
    "engine.model": "a known name, a folder in Hugging Face's layout, a `.gguf` file, or a hub id",
    "engine.args": "settings that are the same for all candidates, by neutral name (of speculation: for all that "
    "speculate); for `command` also `command`, `ready_path` and `log_rules`",
    "engine.env": "variables of the server's environment; null removes one",
    "engine.container": "the server runs in a container of this image",
    "engine.container.runtime": "the program that runs it",
    "engine.container.image": "pulled beforehand; the study keeps its digest",
    "engine.container.mounts": "HOST:CONTAINER, with `:ro` where it is only read",
    "engine.container.gpus": "`all`, or a list of indices",
    "engine.container.devices": "further device files",
    "engine.container.shm_size": "of its shared memory, as in `32g`",
    "engine.container.network": "`host`: it listens on this machine; `bridge`: its port is published on loopback",
    "engine.container.init": "a process that reaps what ends within",
    "engine.container.run_args": "further arguments of the runtime, each a word of its own",
    "engine.api_key_env": "the variable that holds the key which the server wants; only its name is kept",
    "engine.devices": "the only devices that servers may use; the machine's, and no part of what is studied",
    "engine.launch": "how long a server may take",
    "engine.launch.stall_s": "seconds without a sign of life before it is ready",
    "engine.launch.startup_s": "seconds until it is ready at all",
    "engine.launch.smoke_s": "seconds for its first completion",
    "engine.launch.grace_s": "seconds between SIGTERM and SIGKILL",
    "engine.launch.token_stall_s": "seconds without a token while it is measured",
    "workload": "what is asked of the server",
    "workload.prompts": "a set that ships (`mixed`, `humaneval`), or a JSONL file with `prompt` in every line",
    "workload.max_tokens": "output tokens of a request, at most",
    "workload.temperature": "0 is greedy",
    "workload.concurrency": "levels: requests under way at once",
    "workload.weights": "share of real traffic at each level; equal when left out",
    "baseline": "what every candidate is compared with",
    "parameters": "the settings to try, by neutral name; `env.NAME` is a variable, whose value `unset` removes it",
    "parameters.NAME.choices": "the values to try, or",
    "parameters.NAME.low": "the lowest of a range,",
    "parameters.NAME.high": "its highest,",
    "parameters.NAME.step": "and the step between; 1 for whole numbers",
    "parameters.NAME.when": "the setting is active only where this holds",
    "rules": "combinations that may not be tried",
    "rules[].forbid": "a condition",
    "rules[].because": "why; it stands in the report",
    "objective": "what is best",
    "objective.maximize": "what is maximised over the levels, by their weights",
    "objective.guard": "what a winner may not give up, at any level",
    "objective.guard.min_speedup": "the least change of throughput, as a ratio to the baseline",
    "objective.guard.ttft_p90_ms": "the longest time to the first token, p90",
    "objective.guard.tpot_p90_ms": "the longest time for each further token of a stream, p90",
    "objective.concurrency": "the one level that counts, where the objective is of one",
    "objective.slo": "what nine in ten requests must keep, for `goodput`",
    "objective.slo.ttft_ms": "time to the first token",
    "objective.slo.tpot_ms": "time per further token",
    "objective.slo.e2e_ms": "time of the whole request",
    "budget": "where the search ends, whichever comes first; totals over the whole life of the study",
    "budget.launches": "server starts, confirmation included; beyond them, only what was spoiled there is repeated",
    "budget.candidates": "distinct candidates",
    "budget.hours": "with a server, confirmation included",
    "profile": "short: 64 tokens and two levels at most, 4 pairs. full: as the file says, longer windows, 8 pairs",
    "sampler": "what proposes candidates",
    "notify": "whom to tell when a study ends, stops or needs a person; either of",
    "notify.command": "a command that gets JSON on its standard input",
    "notify.url": "an address that gets it by POST; `${NAME}` is a variable of the environment",
    "notify.timeout_s": "seconds until it is given up",
    "simulation": "the machine in the engine's place, for `kind: simulated`",
    "simulation.profile": "which machine",
    "simulation.noise": "a factor on the usual noise",
    "simulation.clock": "`virtual`: blocks come from the model at once; `real`: a server over HTTP",
    "simulation.speed": "how many times faster than the machine a real server answers",
    "quality": "how answers are held against the baseline's",
    "quality.prompts": "held-out prompts that each finalist answers; 0 turns it off",
    "quality.max_tokens": "of an answer",
    "quality.allow_lossy": "a candidate that answers otherwise may win",
    "quality.check_command": "gets both sides' answers as JSON on its standard input, objects by a status other than 0",
}

HEAD = """# The space file

Generated from the schema by `python -m tuner.space.reference`; do not edit it here. A space file is YAML. Unknown keys
are refused, with the nearest one, and `tuner check FILE` lists every problem at once with its line. Examples that run
stand in [search_spaces](../search_spaces); [the guide](guide.md) says how to make one's own.
"""

TAIL = """
## Conditions

`when` and `forbid` see parameters and `engine.args`, by name:

| | |
|---|---|
| comparison | `==` `!=` `<` `<=` `>` `>=`, `in [a, b]`, `not in [a, b]` |
| logic | `and`, `or`, `not`, brackets |
| arithmetic | `+` `-` `*` `/` `//` `%` `**` |
| values | numbers, `'text'`, `True`, `False` |

A comparison with a setting that is inactive is false. A condition that can never hold is an error. Conditions are
parsed, never run as code.

## Overrides

`tuner run FILE --set a.b=c` sets one key, as in `--set engine.kind=simulated` or `--set workload.concurrency=[1,4]`;
the value is read as YAML. Names of settings, and what each engine makes of them: [engines](engines.md).
"""


def page() -> str:
    """The whole page."""
    sections = list(_sections("", schema.SpaceFile))
    parts = [HEAD]
    for path, model in sections:
        title = f"`{path}`" if path else "The file"
        parts += [f"## {title}", "", "| key | value | default | |", "|---|---|---|---|"]
        parts += [_row(path, name, field) for name, field in model.model_fields.items()]
        parts.append("")
    return "\n".join(parts).rstrip() + "\n" + TAIL


def paths() -> list[str]:
    """Every key of the schema, by its whole path."""
    return [_join(path, name) for path, model in _sections("", schema.SpaceFile) for name in model.model_fields]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _sections(path: str, model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    yield path, model
    for name, field in model.model_fields.items():
        for below, suffix in _models(field.annotation):
            yield from _sections(_join(path, name) + suffix, below)


def _models(kind: Any, suffix: str = "") -> Iterator[tuple[type[BaseModel], str]]:
    """Sections within a type, with what stands for a key or a place."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind, suffix
    for inner in get_args(kind):
        if not isinstance(inner, str):
            yield from _models(inner, {dict: ".NAME", list: "[]"}.get(get_origin(kind), suffix))


def _row(path: str, name: str, field: FieldInfo) -> str:
    about = ABOUT.get(_join(path, name), "")
    return f"| `{name}` | {_kind(field.annotation, field.metadata)} | {_default(field)} | {about} |".replace(
        "|  |", "| |"
    )


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if isinstance(value, BaseModel) or value in ([], {}) or value is PydanticUndefined:
        return ""
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{json.dumps(value)}`" if not isinstance(value, str) else f"`{value}`"


def _kind(kind: Any, metadata: list[Any]) -> str:
    """A type in words, with its limits."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _kind(inner[0], [*inner[1:], *metadata])
    if origin in (Union, types.UnionType) and set(inner) >= {int, float}:
        return "number" + _range(metadata)
    if origin in (Union, types.UnionType):
        return _kind(next(each for each in inner if each is not type(None)), metadata)
    if origin is Literal:
        return " or ".join(f"`{each}`" for each in inner)
    if origin is list:
        least = next((m.min_length for m in _limits(metadata) if isinstance(m, MinLen)), 0)
        return f"list of {_kind(inner[0], [])}" + (f", {least} or more" if least else "")
    if origin is dict:
        return f"{_kind(inner[1], [])} by name"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "a section"
    words = {str: "text", int: "whole number", float: "number", bool: "true or false"}.get(kind, "value")
    return words + _range(metadata)


def _limits(metadata: list[Any]) -> Iterator[Any]:
    for each in metadata:
        yield from each.metadata if isinstance(each, FieldInfo) else [each]


def _range(metadata: list[Any]) -> str:
    found = []
    for limit in _limits(metadata):
        if isinstance(limit, Ge):
            found.append(f"{limit.ge} or more")
        elif isinstance(limit, Gt):
            found.append(f"above {limit.gt}")
        elif isinstance(limit, Le):
            found.append(f"at most {limit.le}")
        elif getattr(limit, "func", None) is schema._positive:
            found.append("above 0")
        elif (most := getattr(getattr(limit, "func", None), "limit", None)) is not None:
            found.append(f"at most {most:,.0f}")
    return ", " + ", ".join(found) if found else ""


if __name__ == "__main__":
    print(page(), end="")
