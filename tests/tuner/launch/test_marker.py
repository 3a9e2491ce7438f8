"""Pids of another PID namespace mean nothing here: whose they are is let be."""

from __future__ import annotations

import os
import subprocess
import sys

from tuner.launch.marker import orphaned, same_namespace
from tuner.launch.processes import MARKER, marker_text, pid_namespace
from tuner.launch.reap import marked


def test_a_tuner_of_another_namespace_is_never_called_dead() -> None:
    dead = {"study": "x", "tuner": "1.1"}
    assert orphaned(marker_text(dead))
    assert orphaned(marker_text({**dead, "namespace": pid_namespace()}))
    assert not orphaned(marker_text({**dead, "namespace": "12345"}))
    assert not same_namespace(marker_text({**dead, "namespace": "12345"}))


def test_its_processes_are_not_ours_to_end() -> None:
    study = f"namespace {os.getpid()}"
    found = {}
    for namespace in (pid_namespace(), "12345"):
        marker = marker_text({"study": study, "namespace": namespace})
        child = subprocess.Popen(
            [sys.executable, "-c", "print(flush=True); input()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, MARKER: marker},
        )
        assert child.stdout is not None
        child.stdout.readline()
        found[namespace] = [process.pid for process in marked(marker_text({"study": study}))] == [child.pid]
        child.communicate()
    assert found == {pid_namespace(): True, "12345": False}
