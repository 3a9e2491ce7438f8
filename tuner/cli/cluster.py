"""`--workers ray` of `tuner run` and `tuner resume`: the study's workers run on a Ray cluster, and are watched here."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.cli.console import complain, say
from tuner.errors import EnvironmentBroken, UsageError
from tuner.space import Space

if TYPE_CHECKING:
    from tuner.study.session import Limits


@dataclass(frozen=True)
class Asked:
    """What a user has asked for, beside the study itself. `gpus` and so on are options; None: worked out."""

    workers: str | None
    gpus: int | None
    cpus: int | None
    at_most: int | None
    devices: str | None

    @property
    def ray(self) -> bool:
        """Whether workers are to run on Ray.

        Raises:
            UsageError: it is something else, or options do not go together.
        """
        if self.workers is None:
            given = {"gpus": self.gpus, "cpus": self.cpus, "at-most": self.at_most}
            if extra := [name for name, value in given.items() if value is not None]:
                raise UsageError(f"--{extra[0]} is about workers on a cluster: give --workers ray as well")
            return False
        if self.workers != "ray":
            raise UsageError(f"--workers {self.workers}: is not known; valid: ray")
        if self.devices is not None:
            raise UsageError("--devices and --workers ray: Ray gives each worker its devices; --gpus says how many")
        return True


def run_on_ray(
    asked: Asked,
    *,
    study: str,
    space: Space,
    first: Sequence[str],
    later: Sequence[str],
    copies: dict[str, str],
    files: dict[str, str],
    storage: str | None,
    quiet: bool,
    json_log: bool,
) -> None:
    """Runs a study's workers on Ray to its end, and prints the answer.

    Args:
        asked: the options.
        study: its name.
        space: what says how many GPUs a launch takes, and which secrets the workers need.
        first: the command line of the first worker, without devices.
        later: that of all others: the same without new totals, which must not be added up.
        copies: path → text of files of the study's own, which are written anew on every node.
        files: path → text of the user's files, which are written where there are none, and must be the same.
        storage: the database as an option gave it.
        quiet: print only the answer.
        json_log: print a JSON object a line.
    """
    from tuner import __version__
    from tuner.cli.run import conclude
    from tuner.study.interrupt import Interrupted, Interrupts
    from tuner.study.names import sqlite_file, storage_url
    from tuner.study.notify import variables
    from tuner.study.place import hostname
    from tuner.study.store import open_study, study_exists
    from tuner.workers.drive import Drive
    from tuner.workers.ray_cluster import connected
    from tuner.workers.rooms import Needs, gpus_of_launch, passed_on, require_room

    gpus = gpus_of_launch(space) if asked.gpus is None else asked.gpus
    needs = Needs(gpus, asked.cpus, asked.at_most)
    secrets = [*variables(space.notify), *([space.api_key_env] if space.api_key_env else [])]
    task: dict[str, Any] = {
        "version": __version__,
        "host": hostname(),
        "study": study,
        "folder": str(Path.cwd()),
        "copies": copies,
        "files": files,
        "env": passed_on(secrets, os.environ, storage),
    }
    show = _Shown(quiet=quiet, json_log=json_log)

    def state() -> str:
        with suppress(EnvironmentBroken):  # the workers wait for a database that has gone away, and so do we
            if study_exists(study, storage):
                with closing(open_study(study, storage)) as store:
                    return store.state()
        return ""

    with connected() as cluster:
        found = require_room(cluster.nodes(), needs)
        strangers = sorted({room.host for room in found} - {hostname()})
        if strangers and sqlite_file(storage_url(study, storage)) is not None:
            raise UsageError(
                f"workers on {', '.join(strangers)} cannot share a SQLite file of this host. Nothing was started; keep "
                "the study in PostgreSQL: --storage postgresql+psycopg://…"
            )
        show.told(f"Ray: room for {len(found)} worker{'s' * (len(found) != 1)}, each with {_each(needs.gpus)}")
        drive = Drive(
            cluster,
            needs,
            first={**task, "argv": [*first, "--json-log"]},
            later={**task, "argv": [*later, "--json-log"]},
            state=state,
            said=show.line,
            tell=show.told,
            log=_keep_log,
        )
        with Interrupts().installed():
            try:
                drive.run()
            except Interrupted as error:
                complain(
                    f"\nInterrupted by {error}. The workers are stopped and nothing measured is lost. Go on with the "
                    "same command"
                )
                raise
    with closing(open_study(study, storage)) as store:
        conclude(store.data(), storage=storage, quiet=quiet, json_log=json_log)


def local_files(*names: str) -> dict[str, str]:
    """Path → text of those that are files here; what ships or is a prompt set's name is on every node."""
    found = {}
    for name in names:
        with suppress(OSError, UnicodeDecodeError):
            found[name] = Path(name).read_text(encoding="utf-8")
    return found


def limit_options(limits: Limits) -> list[str]:
    """New totals of a budget as options."""
    given = {name: getattr(limits, name) for name in ("launches", "candidates", "hours", "more")}
    return [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]


def _each(gpus: int) -> str:
    return f"{gpus} GPU{'s' * (gpus != 1)}" if gpus else "a host to itself"


def _keep_log(path: str, content: bytes) -> None:
    """A launch's log of another host, where `tuner logs` looks for it."""
    with suppress(OSError):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(content)


@dataclass
class _Shown:
    """What workers say, as the output is wanted."""

    quiet: bool
    json_log: bool
    began: float = 0.0

    def __post_init__(self) -> None:
        self.began = time.monotonic()

    def told(self, message: str) -> None:
        """What happens to workers."""
        if self.json_log:
            say(json.dumps({"kind": "workers", "message": message}, ensure_ascii=False))
        elif not self.quiet:
            self._say(message)

    def line(self, place: str, line: str) -> None:
        """A line of a worker's: an event, or, where it went wrong, a sentence."""
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if isinstance(event, dict) and "kind" in event:
            if event["kind"] == "recommendation":
                return
            if self.json_log:
                say(json.dumps({**event, "place": place}, ensure_ascii=False))
            elif not self.quiet:
                self._say(f"{place}: {event.get('message', '')}")
        elif line.strip():
            complain(f"{place}: {line}")

    def _say(self, message: str) -> None:
        seconds = int(time.monotonic() - self.began)
        say(f"[{seconds // 60:3d}:{seconds % 60:02d}] {message}")
