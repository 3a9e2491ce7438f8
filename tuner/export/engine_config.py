"""An engine's own configuration file (vLLM's and SGLang's `--config`), with the script that starts it from there."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, replace

from tuner.errors import UsageError
from tuner.export.head import MARK, PLAIN, Options, comment, lines
from tuner.export.provenance import Provenance
from tuner.export.shell import script
from tuner.export.words import Hole, refuse, words
from tuner.export.yaml_text import dump
from tuner.records import LaunchRecord

_SCHEDULE = "num_speculative_tokens_per_batch_size"


def render_vllm(record: LaunchRecord, provenance: Provenance, options: Options = PLAIN) -> dict[str, str]:
    """`vllm.yaml`, `run-vllm.sh` and, where depths go by the batch, their schedule.

    Raises:
        UsageError: the launch was not of vLLM.
    """
    found = _render(record, provenance, "vllm")
    for flag, value in zip(record.argv, record.argv[1:], strict=False):
        if flag == "--speculative-config" and (schedule := _schedule(value)):
            document = {"what": f"{MARK}: batch sizes from, to, and the draft depth there", _SCHEDULE: schedule}
            found["vllm-schedule.json"] = json.dumps(document, indent=1) + "\n"
    return found


def render_sglang(record: LaunchRecord, provenance: Provenance, options: Options = PLAIN) -> dict[str, str]:
    """`sglang.yaml`, `run-sglang.sh` and, where depths go by the batch, the table of `--speculative-adaptive-config`.

    Raises:
        UsageError: the launch was not of SGLang.
    """
    found = _render(record, provenance, "sglang")
    for i, text in enumerate(record.files.values()):
        found["sglang-adaptive.json" if i == 0 else f"sglang-file-{i}.json"] = text
    return found


def render_engine(record: LaunchRecord, provenance: Provenance, options: Options = PLAIN) -> dict[str, str]:
    """The configuration of whichever engine it was.

    Raises:
        UsageError: the engine has no such file.
    """
    if record.engine == "vllm":
        return render_vllm(record, provenance, options)
    if record.engine == "sglang":
        return render_sglang(record, provenance, options)
    raise UsageError(
        f"an engine of kind {record.engine} takes no configuration file that the tuner knows; --format shell or json "
        "says the same. Nothing was written."
    )


def _schedule(value: str) -> object:
    try:
        config = json.loads(value)
    except ValueError:
        return None
    return config.get(_SCHEDULE) if isinstance(config, dict) else None


@dataclass(frozen=True)
class Split:
    """A command in two: `before` the configuration file, what is in it, and what stays `behind` it."""

    before: tuple[str, ...]
    config: dict[str, str | bool]
    behind: tuple[str, ...]


def split(record: LaunchRecord) -> Split:
    """What of a command a configuration file can say: each flag once, with one value or none.

    The address and secrets stay on the command line, and so does what an engine's file has no form for: short flags,
    flags that come twice or have several values, empty values, and `--no-…` flags, which some read as others.
    """
    argv = record.argv
    plain_word = [not any(isinstance(part, Hole) for part in word) for word in words(record)]
    first = next((i for i, argument in enumerate(argv) if i and argument.startswith("--")), len(argv))
    groups: list[list[int]] = []
    for i in range(first, len(argv)):
        if _is_flag(argv[i]) or not groups:
            groups.append([i])
        else:
            groups[-1].append(i)
    names = Counter(_name(argv[group[0]]) for group in groups)
    config: dict[str, str | bool] = {}
    behind: list[str] = []
    for group in groups:
        flag, equals, value = argv[group[0]].partition("=")
        given = [value] if equals else [argv[i] for i in group[1:]]
        sayable = (
            re.fullmatch(r"--[a-z0-9][a-z0-9-]*", flag)
            and len(given) + (len(group) - 1 if equals else 0) <= 1
            and names[_name(flag)] == 1
            and all(plain_word[i] for i in group)
            and (given[0] != "" if given else not flag.startswith("--no-"))
        )
        if sayable:
            config[flag.removeprefix("--")] = given[0] if given else True
        else:
            behind += [argv[i] for i in group]
    return Split(argv[:first], config, tuple(behind))


def _is_flag(argument: str) -> bool:
    return argument.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?(e-?\d+)?", argument) and argument != "-"


def _name(flag: str) -> str:
    """A flag without dashes, value and `no-`."""
    return flag.partition("=")[0].lstrip("-").replace("_", "-").removeprefix("no-")


def _render(record: LaunchRecord, provenance: Provenance, engine: str) -> dict[str, str]:
    refuse(record)
    if record.engine != engine:
        raise UsageError(
            f"the launch was of an engine of kind {record.engine}, which reads no configuration of {engine}'s. Nothing "
            "was written."
        )
    if record.container is not None:
        raise UsageError(
            f"the launch ran in a container, whose command cannot name a file of this machine; --format compose, "
            f"kubernetes or helm carry the command of {engine} whole. Nothing was written."
        )
    said = split(record)
    file = f"{engine}.yaml"
    short = replace(record, argv=(*said.before, "--config", file, *said.behind))
    at = len(said.before) + 1
    return {
        file: comment([*lines(record, provenance), "", f"Start: run-{engine}.sh"]) + dump(said.config),
        f"run-{engine}.sh": script(short, provenance, {at: f'"$here/{file}"'}),
    }
