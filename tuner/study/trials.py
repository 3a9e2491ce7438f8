"""The study's trials in Optuna's own tables, so that its dashboard and tools can read them."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine

from tuner.errors import UsageError
from tuner.study import optuna_tables
from tuner.study.data import StoredTrial, TrialKind
from tuner.study.database import ADVICE, LOCK_TIMEOUT_S, OTHER_VERSION, network_arguments
from tuner.study.names import sqlite_file
from tuner.study.turn import making_tables

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

    from tuner.study.sampler import Proposal
    from tuner.study.score import Score

_accepted: set[str] = set()
"""Versions of Optuna's tables that it has found to be its own, in this process: finding out takes most of an open."""


def _storage(url: str, arguments: dict[str, Any]) -> optuna.storages.RDBStorage:
    """Optuna's storage.

    Raises:
        RuntimeError: its tables are of another version.
    """
    from tuner.study.quiet_optuna import optuna

    if _accepted:
        storage = optuna.storages.RDBStorage(url, engine_kwargs=arguments, skip_compatibility_check=True)
        if storage.get_current_version() in _accepted:
            return storage
        storage.engine.dispose()
    storage = optuna.storages.RDBStorage(url, engine_kwargs=arguments)
    _accepted.add(storage.get_current_version())
    return storage


class Trials:
    """The ledger of trials. A trial begins in one transaction, with all its parameters, or is not there at all.

    It is read by plain statements where Optuna's tables are of the version that we know. Optuna itself is loaded for
    what is written, and for tables of any other version.

    Args:
        url: the database.
        name: the study.
        reading: the connections of the study's own tables.
    """

    def __init__(self, url: str, name: str, reading: Engine) -> None:
        self._url = url
        self._name = name
        self._reading = reading
        with reading.connect() as connection:
            self._plain = optuna_tables.known(connection, name)
        self._read: dict[int, StoredTrial] = {}
        if not self._plain:
            self._study  # noqa: B018 - it refuses what is of another version, and makes what is not there yet

    @cached_property
    def _storage(self) -> optuna.storages.RDBStorage:
        file = sqlite_file(self._url) is not None
        arguments = {"connect_args": {"timeout": LOCK_TIMEOUT_S}} if file else network_arguments(self._url)
        try:
            with making_tables(self._reading):
                return _storage(self._url, arguments)
        except RuntimeError as error:  # what Optuna raises when its tables are of another version
            raise UsageError(f"{OTHER_VERSION}, or with another Optuna: {error} {ADVICE}") from error

    @cached_property
    def _study(self) -> optuna.Study:
        from tuner.study.quiet_optuna import optuna

        # Proposals are made elsewhere (sampler.py); a random sampler here costs nothing where Optuna insists on one.
        sampler = optuna.samplers.RandomSampler(seed=0)
        try:
            # Not `load_if_exists`: it writes before it looks, and who only reads would wait for whoever writes.
            return optuna.load_study(storage=self._storage, study_name=self._name, sampler=sampler)
        except KeyError:
            return optuna.create_study(
                storage=self._storage, study_name=self._name, direction="maximize", load_if_exists=True, sampler=sampler
            )

    @property
    def engine(self) -> Engine:
        """Optuna's own connections to the database."""
        return self._storage.engine

    def close(self) -> None:
        """Gives the connections back."""
        if "_storage" in self.__dict__:
            self._storage.remove_session()
            self._storage.engine.dispose()

    def history(self) -> list[FrozenTrial]:
        """All trials as Optuna has them, by number."""
        return self._study.get_trials(deepcopy=False)

    def all(self) -> tuple[StoredTrial, ...]:
        """All trials, by number."""
        if not self._plain:
            return tuple(_stored(trial) for trial in self.history())
        with self._reading.connect() as connection:
            found = optuna_tables.read(connection, self._name, self._read)
        self._read = {trial.number: trial for trial in found}
        return found

    def outline(self) -> tuple[StoredTrial, ...]:
        """All trials, by number, without their parameters."""
        if not self._plain:
            return self.all()
        with self._reading.connect() as connection:
            return optuna_tables.read(connection, self._name, params=False)

    def begin(self, kind: TrialKind, candidate_id: str, proposal: Proposal | None, place: str = "") -> None:
        """Adds a running trial of a place; `proposal` is None for a baseline that the parameters do not make up."""
        self._study.add_trial(_template(True, kind, candidate_id, proposal, None, "", place))

    def take_over(self, number: int, place: str, repetition: int) -> None:
        """A running trial whose worker is gone begins anew at another place, as another repetition of its slot."""
        self._storage.set_trial_user_attr(self._id(number), "at", [place, repetition])

    def record(
        self, kind: TrialKind, candidate_id: str, proposal: Proposal, score: Score, why: str, place: str = ""
    ) -> None:
        """Adds a trial that needs no launch, with its value; `place` is where an imported one was measured."""
        self._study.add_trial(_template(False, kind, candidate_id, proposal, score, why, place))

    def _id(self, number: int) -> int:
        storage = self._storage
        study = storage.get_study_id_from_name(self._study.study_name)
        return storage.get_trial_id_from_study_id_trial_number(study, number)

    def tell(self, number: int, score: Score, why: str = "", kind: TrialKind | None = None) -> None:
        """Ends a running trial: COMPLETE, with a finite value, whatever came of it; telling it again does nothing.

        `kind` is what it turned out to be, where it is not what it began as. Constraints, kind and reason go first, for
        nothing can be written to a finished trial.
        """
        from tuner.study.quiet_optuna import optuna

        trial_id = self._id(number)
        stored = self._storage.get_trial(trial_id)
        if stored.state.is_finished():
            return
        trial = optuna.trial.Trial(self._study, trial_id)
        for constraint, value in score.constraints.items():
            if constraint not in stored.constraints:
                trial.set_constraint(constraint, value)
        trial.set_user_attr("why", why)
        if kind is not None:
            trial.set_user_attr("kind", kind)
        self._study.tell(number, score.value)


def _template(
    running: bool,
    kind: TrialKind,
    candidate_id: str,
    proposal: Proposal | None,
    score: Score | None,
    why: str,
    place: str = "",
) -> FrozenTrial:
    from tuner.study.quiet_optuna import optuna

    at = {"at": [place, 0]} if place else {}
    state = optuna.trial.TrialState.RUNNING if running else optuna.trial.TrialState.COMPLETE
    return optuna.trial.create_trial(
        state=state,
        value=score.value if score else None,
        params=dict(proposal.params) if proposal else {},
        distributions=dict(proposal.distributions) if proposal else {},
        user_attrs={"candidate": candidate_id, "kind": kind, "why": why, **at},
        system_attrs=dict(proposal.system_attrs) if proposal else {},
        constraints=dict(score.constraints) if score else None,
    )


def _stored(trial: FrozenTrial) -> StoredTrial:
    place, repetition = trial.user_attrs.get("at", ("", 0))
    return StoredTrial(
        number=trial.number,
        candidate_id=trial.user_attrs["candidate"],
        kind=trial.user_attrs["kind"],
        running=not trial.state.is_finished(),
        params=dict(trial.params),
        value=trial.value,
        constraints=dict(trial.constraints),
        why=trial.user_attrs.get("why", ""),
        place=place,
        repetition=repetition,
    )
