"""What a marker says: the study and launch, the tuner, and the PID namespace in which the tuner's pid means it."""

from __future__ import annotations

from urllib.parse import unquote

from tuner.launch.processes import look, pid_namespace


def parse_marker(text: str) -> dict[str, str]:
    """The entries of a marker; `marker_text` reversed."""
    entries = (entry.partition("=") for entry in text.split(";") if "=" in entry)
    return {unquote(key): unquote(value) for key, _, value in entries}


def same_namespace(marker: str) -> bool:
    """Whether the pids of the marker's tuner are ours. From another namespace, it cannot be told who lives."""
    return parse_marker(marker).get("namespace", "") in ("", pid_namespace())


def orphaned(marker: str) -> bool:
    """Whether the tuner that a marker names is dead. A marker that names none is left alone, and one from elsewhere."""
    pid, _, started = parse_marker(marker).get("tuner", "").partition(".")
    if not (pid.isdigit() and started.isdigit()) or not same_namespace(marker):
        return False
    tuner = look(int(pid))
    return tuner is None or tuner.zombie or tuner.started != int(started)
