"""A worker's process on a node of a cluster: an ordinary `tuner run`, told by a pipe what to do and when to end.

Its first line on standard input is JSON: `argv`, `env` (what it needs of the environment of whoever asked, secrets
among it, which so stand on no command line), `folder`, `copies`, `files`, `study`, `devices`. When the input ends, so
does it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner.errors import TunerError, UsageError
from tuner.files import write_whole

POLL_S = 1.0


def main() -> int:
    """Runs the tuner; returns its exit status."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})  # as Ray blocks some
    line = sys.stdin.buffer.readline()
    if not line:
        return 143
    task = json.loads(line)
    os.environ.update(task["env"])
    threading.Thread(target=_end_with_input, daemon=True, name="input").start()
    try:
        os.chdir(_folder(task["folder"], task["study"]))
        from tuner.workers.ray_cluster import FOLDER

        print(f"{FOLDER}{Path.cwd()}", flush=True)
        write_whole({Path(name): text for name, text in task["copies"].items()})
        for name, text in task["files"].items():
            _put(Path(name), text)
        _wait_for_place(task["study"], tuple(task["devices"]))
    except TunerError as error:
        print(error, flush=True)
        return error.exit_code
    except OSError as error:
        print(f"{error.filename or task['folder']} cannot be written here: {error.strerror}", flush=True)
        return 3
    argv = [*task["argv"], *(["--devices", ",".join(task["devices"])] if task["devices"] else [])]
    from tuner.cli.app import app

    try:
        app(argv)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _end_with_input() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os.kill(os.getpid(), signal.SIGTERM)


def _folder(wanted: str, study: str) -> Path:
    """The folder of this name, or where there is none, one of our own."""
    if Path(wanted).is_dir() and os.access(wanted, os.W_OK):
        return Path(wanted)
    found = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spec-tuner" / "workers" / study
    found.mkdir(parents=True, exist_ok=True)
    return found


def _put(path: Path, text: str) -> None:
    """Writes a file of the study where there is none.

    Raises:
        UsageError: there is another one.
    """
    if path.exists():
        if path.read_text(encoding="utf-8") != text:
            raise UsageError(
                f"{path.absolute()} on this node is not the file of that name where the study was begun. Nothing was "
                "started here; remove it, or make both the same"
            )
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _wait_for_place(study: str, devices: tuple[str, ...]) -> None:
    """Waits while a worker that was here before still stops its server; one that is dead is not waited for."""
    from contextlib import closing

    from tuner.study.lease import working
    from tuner.study.place import Place, hostname
    from tuner.study.store import open_study, study_exists

    storage, us, told = os.environ.get("TUNER_STORAGE"), Place(hostname(), devices), False
    if not study_exists(study, storage):
        return
    with closing(open_study(study, storage)) as store:
        while others := [each for each in working(store.engine, study) if each.place.overlaps(us)]:
            if not told:
                _tell(f"waits for the worker that was at {others[0].place.name} (process {others[0].holder.pid})")
                told = True
            time.sleep(POLL_S)


def _tell(message: str) -> None:
    facts: Mapping[str, Any] = {"kind": "waiting", "message": message}
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    sys.exit(main())
