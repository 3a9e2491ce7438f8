"""`compose.yaml`: the server as a service of Docker Compose, reachable from this machine unless told otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tuner.export.head import GRACE_S, PLAIN, START_S, Options, comment, lines
from tuner.export.provenance import Provenance
from tuner.export.words import Hole, Word
from tuner.export.workload import Workload, key_variable, probe, workload
from tuner.export.yaml_text import dump
from tuner.records import LaunchRecord

FILE = "compose.yaml"


def render_compose(record: LaunchRecord, provenance: Provenance, options: Options = PLAIN) -> dict[str, str]:
    """File name → text. HOST and PORT in the environment say where the service is published.

    Raises:
        UsageError: for a record that Compose cannot express.
    """
    made = workload(record, provenance.study, options)
    head = [*lines(record, provenance), "", *made.notes]
    if made.host_network:
        head.append(f"It listens on {record.host}:{record.port} of this machine.")
    else:
        head.append(f"HOST and PORT say where it is published: 127.0.0.1 and {record.port} where they do not.")
    head.append("Needs Docker Compose 2.23.1 or later.")
    head += [f"Set {name} to the secret that was left out of this file." for name in made.secrets]
    document: dict[str, Any] = {
        "name": made.name,
        "x-spec-tuner": _escaped({"record": provenance.record_hash, **provenance.to_dict()}),
        "services": {"engine": _service(made, record)},
    }
    if made.files:
        document["configs"] = {f"file-{i}": {"content": escape(text)} for i, text in enumerate(made.files.values())}
    return {FILE: comment(head) + dump(document)}


def _service(made: Workload, record: LaunchRecord) -> dict[str, Any]:
    found: dict[str, Any] = {"image": escape(made.image)}
    if made.program:
        found["entrypoint"] = [_said(word) for word in made.program]
    found["command"] = [_said(word) for word in made.arguments]
    if made.env:
        found["environment"] = {name: _said(word) for name, word in made.env.items()}
    optional: dict[str, Any] = {
        "working_dir": escape(made.workdir),
        "user": escape(made.user),
        "init": made.init,
        "privileged": made.privileged,
        "cap_add": made.cap_add,
        "ipc": "host" if made.ipc_host else "",
        "network_mode": "host" if made.host_network else "",
        "shm_size": made.shm_size or "",
        "ulimits": {name: _limit(value) for name, value in made.ulimits.items()},
        "devices": [escape(device) for device in made.devices],
    }
    found |= {name: value for name, value in optional.items() if value}
    if not made.host_network:
        found["ports"] = [f"${{HOST:-127.0.0.1}}:${{PORT:-{made.port}}}:{made.port}"]
    if made.mounts:
        found["volumes"] = [
            {"type": "bind", "source": escape(m.source), "target": escape(m.target), "read_only": m.readonly}
            for m in made.mounts
        ]
    if made.files:
        found["configs"] = [
            {"source": f"file-{i}", "target": escape(path), "mode": 0o444} for i, path in enumerate(made.files)
        ]
    if made.gpus is not None:
        found["deploy"] = {"resources": {"reservations": {"devices": [_gpus(made.gpus)]}}}
    found["healthcheck"] = {
        "test": ["CMD", *map(escape, probe(record, made.port, key_variable(made)))],
        # One interval for the start and for ever after: Compose refuses a start_interval on engines before Docker 25,
        # and on Podman.
        "interval": "10s",
        "timeout": "30s",
        "retries": 3,
        "start_period": f"{START_S}s",
    }
    # Some engines end with status 0 when they break, so that "on-failure" would leave them dead.
    found |= {"restart": "unless-stopped", "stop_signal": "SIGTERM", "stop_grace_period": f"{GRACE_S}s"}
    return found


def escape(text: str) -> str:
    """Text that Compose leaves as it is."""
    return text.replace("$", "$$")


def _escaped(value: Any) -> Any:
    return mapped(value, escape)


def mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every text in it changed, keys too."""
    if isinstance(value, dict):
        return {change(str(key)): mapped(each, change) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [mapped(each, change) for each in value]
    return change(value) if isinstance(value, str) else value


def _said(word: Word) -> str:
    said = "is a secret and was left out of this file"
    return "".join(f"${{{part.name}:?{said}}}" if isinstance(part, Hole) else escape(part) for part in word)


def _limit(value: str) -> int | dict[str, int]:
    soft, colon, hard = value.partition(":")
    return {"soft": int(soft), "hard": int(hard)} if colon else int(value)


def _gpus(gpus: str | int | list[int]) -> dict[str, Any]:
    found: dict[str, Any] = {"driver": "nvidia", "capabilities": ["gpu"]}
    if isinstance(gpus, list):
        return {**found, "device_ids": [str(index) for index in gpus]}
    return {**found, "count": int(gpus) if str(gpus).isdecimal() else "all"}
