"""Holds a deployment against its record: settings in effect, speed within the record's noise, answers."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from tuner.engines.base import get_engine, version_of
from tuner.errors import EnvironmentBroken, LaunchFailed, UsageError
from tuner.export.json_file import Exported, load_export
from tuner.export.reference import Reference
from tuner.export.words import Hole, address_parts, movable
from tuner.files import write_whole
from tuner.judge.holds import LevelHolds, level_holds
from tuner.judge.quality import Answers, Quality, compare
from tuner.records import Failure, LaunchRecord
from tuner.space import Space
from tuner.study.again import Fresh, Measured, Started, measure_again
from tuner.study.engine import in_image
from tuner.study.hardware import hardware
from tuner.study.probe import HttpProbe
from tuner.study.session import container_image
from tuner.study.simulated_world import world_of
from tuner.study.world import RunningServer, World, api_key

HISTORY = "verified.jsonl"
"""Beside an export: every verification of it, one JSON object a line."""

WIDE = 0.15
"""A tolerance above this hides losses that a person would want to know of, which is then said."""

Outcome = Literal["holds", "does not hold", "different machine"]

EXIT: Mapping[Outcome, int] = {"holds": 0, "does not hold": 1, "different machine": 3}

_SCRIPTS = ("run.sh", "run-vllm.sh", "run-sglang.sh")


@dataclass(frozen=True)
class Verified:
    """What came of a verification.

    `different` says in sentences what is not as it was on the machine that was measured; `wrong` what does not hold;
    `unknown` what could not be checked, and why.
    """

    what: str
    study: str
    record_hash: str
    at: float
    outcome: Outcome
    levels: tuple[LevelHolds, ...] = ()
    different: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    quality: Quality | None = None
    simulated: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


@dataclass
class _Findings:
    different: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def load(folder: Path, *, allow_simulated: bool) -> Exported:
    """An export that a server can be held against.

    Raises:
        UsageError: there is none, it is of a simulated study without `allow_simulated`, or holds no figures.
    """
    found = load_export(folder)
    if found.record.simulated and not allow_simulated:
        raise UsageError(
            f"{folder} is of a simulated study: its figures come from a model of a machine, and no server can be held "
            "against them. Nothing was started; to try it all the same, add --allow-simulated."
        )
    if found.reference is None or not found.reference.levels:
        raise UsageError(
            f"{folder} holds no figures to hold a server against. Nothing was started; export the study again."
        )
    return found


def verify(
    exported: Exported,
    folder: Path,
    *,
    url: str | None = None,
    port: int | None = None,
    launches: int = 1,
    seed: int = 0,
    say: Callable[[str], None] = lambda _line: None,
) -> Verified:
    """Starts the exported artefact `launches` times, or takes the server at `url`, and holds it against the record.

    Raises:
        UsageError: the artefact cannot be started here, or wants what is not given.
        EnvironmentBroken: the engine is not here, or of another version; the port is taken; nothing answers at `url`;
            nothing valid can be measured.
    """
    reference = exported.reference
    assert reference is not None
    space = Space.from_dict(dict(reference.space))
    engine = get_engine(space.kind)
    found = _Findings()
    if url is None:
        artefact_start(exported, folder, port)
        _engine_here(exported, space)
        _machine_here(exported, found)
    elif not _is_here(url):
        found.unknown.append("the machine: it is not this one, so that it cannot be compared with the measured one")
    else:
        _machine_here(exported, found)
    world = world_of(space, seed + 1)
    recorded = Answers.from_dict(reference.answers) if reference.answers else None
    probe = _probe(space, recorded)
    levels = [level.concurrency for level in reference.levels]
    runs: list[Measured] = []
    for number in range(launches):
        record, started = _started(exported, folder, space, world, url, port)
        try:
            run = measure_again(
                started,
                world,
                record,
                engine,
                levels,
                seed=seed + number,
                probe=probe if number == 0 else None,
                recorded=recorded,
                say=say,
            )
        except LaunchFailed as error:
            if error.failure.blame == "environment" or url is not None:
                raise EnvironmentBroken(f"{_said(error.failure)}. Nothing was changed") from error
            found.wrong.append(_said(error.failure))
            break
        runs.append(run)
        if run.failure is not None:
            found.wrong.append(_said(run.failure))
            break
    return _judged(exported, reference, runs, found, recorded, url or str(folder))


def _judged(
    exported: Exported,
    reference: Reference,
    runs: list[Measured],
    found: _Findings,
    recorded: Answers | None,
    what: str,
) -> Verified:
    levels = []
    for level in reference.levels:
        rates = [run.blocks[level.concurrency].tokens_per_s for run in runs if level.concurrency in run.blocks]
        if rates:
            levels.append(
                level_holds(
                    level.concurrency,
                    level.tokens_per_s,
                    rates,
                    within=level.within,
                    pair_sd=reference.pair_sd,
                    claims=len(reference.levels),
                )
            )
    found.wrong += [
        f"concurrency {each.concurrency}: {each.measured:.1f} tokens/s, recorded {each.recorded:.1f} "
        f"({100 * (each.ratio - 1):+.1f} %; noise explains {100 * each.tolerance:.1f} %)"
        for each in levels
        if each.outcome == "slower"
    ]
    found.unknown += [
        f"a loss of less than {100 * each.tolerance:.0f} % at concurrency {each.concurrency}: launches of one "
        "configuration differ by that much here; --launches 4 would show a smaller one"
        for each in levels
        if each.outcome == "holds" and each.tolerance > WIDE
    ]
    if runs and runs[0].effective is None:
        found.unknown.append("the settings in effect: the server does not tell them")
    quality = None
    if runs and not runs[0].failure:
        quality = _quality(exported, runs[0], recorded, found)
    outcome: Outcome = "does not hold" if found.wrong else "holds"
    if found.different:
        outcome = "different machine"
    return Verified(
        what=what,
        study=exported.provenance.study,
        record_hash=exported.provenance.record_hash,
        at=time.time(),
        outcome=outcome,
        levels=tuple(levels),
        different=tuple(found.different),
        wrong=tuple(found.wrong),
        unknown=tuple(found.unknown),
        quality=quality,
        simulated=exported.record.simulated,
    )


def _quality(exported: Exported, run: Measured, recorded: Answers | None, found: _Findings) -> Quality | None:
    if recorded is None:
        found.unknown.append("the answers: the study kept none of this candidate")
        return None
    if run.answers is None:
        found.unknown.append(f"the answers: {run.no_answers or 'not asked for on a virtual clock'}")
        return None
    if len(run.answers.texts) != len(recorded.texts) or run.answers.asked != recorded.asked:
        found.unknown.append("the answers: the gate's prompts are not those of the study any more")
        return None
    verdict = compare(exported.provenance.candidate, run.judged or recorded, run.answers)
    if verdict.outcome == "different":
        found.wrong.append(f"the answers are not those that were recorded: {verdict.why}")
    elif verdict.outcome == "unknown":
        found.unknown.append(f"the answers: {verdict.why}")
    return verdict


# -- before the start ---------------------------------------------------------------------------------------------


def _engine_here(exported: Exported, space: Space) -> None:
    """The engine of the measured version, or an error."""
    record = exported.record
    if shutil.which(record.argv[0]) is None:
        raise EnvironmentBroken(
            f"the program {record.argv[0]} is not here, and the launch starts it. Nothing was started; verify it where "
            "the engine is installed"
        )
    engine = get_engine(space.kind)
    here = in_image(version_of(engine, space.args, contained=space.container is not None), container_image(space))
    then = exported.reference.fingerprint.get("engine_version") if exported.reference else None
    then = then or exported.provenance.engine_version
    if here != then:
        raise EnvironmentBroken(
            f"the engine here is {record.engine} {here}, and what was measured is {then}. Nothing was started; install "
            "that version, or make a study of this one"
        )


def _machine_here(exported: Exported, found: _Findings) -> None:
    now = hardware()
    then = exported.provenance.machine
    found.different += [f"{key}: was {then[key]!r}, is {now.get(key)!r}" for key in then if now.get(key) != then[key]]


def _is_here(url: str) -> bool:
    return (urlsplit(url).hostname or "") in ("127.0.0.1", "localhost", "::1")


def _probe(space: Space, recorded: Answers | None) -> HttpProbe | None:
    from tuner.study.session import quality_probe
    from tuner.study.simulated_world import virtual

    if recorded is None or virtual(space):
        return None
    return quality_probe(space)


# -- the start ----------------------------------------------------------------------------------------------------


def _started(
    exported: Exported, folder: Path, space: Space, world: World, url: str | None, port: int | None
) -> tuple[LaunchRecord, Started]:
    if url is not None:
        remote = _At.of(exported.record, url)
        return remote, nullcontext(cast(RunningServer, _Remote(remote, api_key(space))))
    missing = [name for name in exported.secrets if not os.environ.get(name)]
    if missing:
        raise UsageError(f"{', '.join(missing)}: is a secret that the export left out; set it. Nothing was started.")
    record = artefact_start(exported, folder, port)
    if not _free(world, record):
        raise EnvironmentBroken(
            f"port {record.port} of {record.host} is taken by another program. Nothing was started; end that one, or "
            "name another port with --port"
        )
    logs = folder if folder.is_dir() and os.access(folder, os.W_OK) else Path(tempfile.gettempdir())
    return record, Fresh(world, record, logs / "verify.log")


def _free(world: World, record: LaunchRecord) -> bool:
    from tuner.launch.ports import is_free
    from tuner.study.simulated_world import SimulatedWorld

    return isinstance(world, SimulatedWorld) or is_free(record.port, record.host)


def artefact_start(exported: Exported, folder: Path, port: int | None) -> LaunchRecord:
    """The record with the exported file's own start in place of its command.

    Raises:
        UsageError: the files of this export are for something that is not started here.
    """
    record = exported.record
    folder = folder.parent if folder.is_file() else folder
    can = movable(record)[1]
    if port is not None and port != record.port and (not can or record.container is not None):
        raise UsageError(
            f"the command does not show where its port stands, so it stays {record.port}. Nothing was started."
        )
    moved = {"PORT": str(port)} if port is not None and port != record.port else {}
    to = replace(record, port=port or record.port)
    if record.container is not None or record.simulated:
        # The container is found again by what only the launch adds to its command.
        return _moved(exported, to.port)
    script = next((name for name in _SCRIPTS if name in exported.files), None)
    if script is not None:
        _present(folder / script)
        return replace(to, argv=("/bin/sh", str((folder / script).resolve())), env=moved, files={}, cwd="")
    if "engine.env" in exported.files:
        _present(folder / "engine.env")
        start = f"cd {shlex.quote(str(folder.resolve()))}; set -a; . ./engine.env; set +a; "
        start += 'eval "unset $ENGINE_UNSET; exec $ENGINE_COMMAND"'
        if moved:
            raise UsageError(
                "an env file holds its port; end what listens there, or export as shell. Nothing was started."
            )
        return replace(to, argv=("/bin/sh", "-c", start), env={}, files={}, cwd="")
    if exported.files == ("launch.json",):
        return _moved(exported, to.port)
    named = ", ".join(name for name in exported.files if name != "launch.json")
    raise UsageError(
        f"{named}: is started by its own tool, not here. Nothing was started; start it, and run: "
        f"tuner verify http://HOST:PORT --record {folder}"
    )


def _moved(exported: Exported, port: int) -> LaunchRecord:
    """The record's own command, on this port, with the secrets that the export has left out."""
    record = exported.record

    def told(text: str) -> str:
        for name in exported.secrets:
            text = text.replace(f"${{{name}}}", os.environ.get(name, ""))
        return text

    argv = tuple(map(told, record.argv))
    env = {name: None if value is None else told(value) for name, value in record.env.items()}
    whole = replace(record, argv=argv, env=env)
    address = {"host": record.host, "port": str(port)}
    words = [address_parts(whole, i) for i in range(len(argv))]
    moved = ("".join(address[part.kind] if isinstance(part, Hole) else part for part in word) for word in words)
    return replace(whole, argv=tuple(moved), port=port)


def _present(file: Path) -> None:
    if not file.is_file():
        raise UsageError(f"{file} is gone, and belongs to the export. Nothing was started; export the study again.")


@dataclass(frozen=True)
class _At(LaunchRecord):
    """A record of a server that runs at a URL of its own."""

    url: str = ""

    @classmethod
    def of(cls, record: LaunchRecord, url: str) -> _At:
        """The record, answering at `url`.

        Raises:
            UsageError: it is no URL.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"'{url}' is not the URL of a server; for instance http://127.0.0.1:8000")
        if parts.username or parts.password:
            raise UsageError("a URL that holds a password is not taken: it would be kept. Use engine.api_key_env.")
        base = url.rstrip("/").removesuffix("/v1")
        fields = {name: getattr(record, name) for name in record.__dataclass_fields__}
        # Emptying its cache, where it can be asked for at all, is not for a server that others use.
        fields["flush_path"] = None
        return cls(**fields, url=base)

    @property
    def base_url(self) -> str:
        """Where it answers."""
        return self.url


class _Remote:
    """A `RunningServer` that is somebody else's: it is asked, and left as it is."""

    pid = 0
    cpu_s = None
    """Its load cannot be told from a stranger's."""

    def __init__(self, record: _At, key: str | None) -> None:
        self._record, self._key = record, key

    def wait_ready(self) -> None:
        """It must answer at once."""
        import httpx

        from tuner.ask import ask

        try:
            path = self._record.ready_path
            status = ask("GET", self._record.base_url + path, headers=self._headers, timeout_s=10).status
        except httpx.HTTPError as error:
            raise EnvironmentBroken(f"nothing answers at {self._record.url}: {error!r}") from error
        if status in (401, 403):
            raise UsageError(
                f"{self._record.url} wants an API key; the study names the variable of one with engine.api_key_env"
            )
        if status != 200:
            raise EnvironmentBroken(
                f"{self._record.url}{path} answers with status {status}, as a server that is not ready"
            )

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}

    def smoke(self) -> None:
        """The blocks are requests enough."""

    def server_info(self) -> dict[str, Any] | None:
        """What it says about itself, where it says it to everybody."""
        import httpx

        from tuner.ask import ask

        if self._record.info_path is None:
            return None
        try:
            reply = ask("GET", self._record.base_url + self._record.info_path, headers=self._headers, timeout_s=10)
            data = reply.json() if reply.status == 200 else None
        except (httpx.HTTPError, ValueError):
            return None
        return data if isinstance(data, dict) else None

    def failure(self, *, wait_s: float = 0.0) -> Failure | None:
        """Not seen from here."""
        return None

    def stop(self) -> Any:
        """It is left running."""


def _said(failure: Failure) -> str:
    return f"{failure.kind} ({failure.phase}): {failure.message}"


# -- what is kept -------------------------------------------------------------------------------------------------


def history(folder: Path) -> list[dict[str, Any]]:
    """Earlier verifications of an export, oldest first; what cannot be read is left out."""
    try:
        rows = (folder / HISTORY).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for row in rows:
        try:
            found.append(json.loads(row))
        except ValueError:
            continue
    return [each for each in found if isinstance(each, dict)]


def keep(folder: Path, verified: Verified) -> Path:
    """Adds a verification to those of an export, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    path = folder / HISTORY
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    row = json.dumps(verified.to_dict(), ensure_ascii=False)
    write_whole({path: f"{before}{row}\n"})
    return path


__all__ = ["EXIT", "HISTORY", "RunningServer", "Verified", "history", "keep", "load", "verify"]
