"""A search space: parameters with conditions, rules, and the candidates that they make up."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Protocol, Self

from tuner.errors import UsageError
from tuner.records import Candidate, Setting, short_hash
from tuner.space.expression import Expression, ExpressionError, parse
from tuner.space.schema import (
    BudgetSection,
    ContainerSection,
    LaunchSection,
    NotifySection,
    ObjectiveSection,
    ParameterSection,
    Profile,
    QualitySection,
    Sampler,
    SimulationSection,
    SpaceFile,
)

SIMULATED = "simulated"
"""The kind of engine that stands in for any other."""

COMMAND = "command"
"""The kind of engine that is known to take no other values than a space lists."""

SPECULATIVE = frozenset(
    {
        "num_steps",
        "topk",
        "num_draft_tokens",
        "spec_version",
        "disable_batch_threshold",
        "steps_by_batch",
        "ngram_min",
        "ngram_max",
        "policy",
        "acceptance",
        "draft_head",
        "draft_model",
        "hybrid",
        "hybrid_steps",
        "draft_attention_backend",
    }
)
"""Settings that say nothing once `speculation` is "none": such candidates are one and the same."""

SHORT_MAX_TOKENS = 64
MAX_DOMAIN = 10_000
MAX_COMBINATIONS = 20_000

ROUNDING = Fraction(1, 10**8)
"""Of a step: a number so near to a value of a range is that value. It is what Optuna allows."""


class Suggests(Protocol):
    """The part of an Optuna trial that a space needs."""

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        """One of the choices."""

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1) -> int:
        """A whole number in the range."""

    def suggest_float(self, name: str, low: float, high: float, *, step: float | None = None) -> float:
        """A number in the range."""


class Drawn:
    """Answers a space's questions at random."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """One of the choices."""
        return self.draw.choice(list(choices))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1) -> int:
        """A whole number in the range."""
        return self.draw.randrange(low, high + 1, step)

    def suggest_float(self, name: str, low: float, high: float, *, step: float | None = None) -> float:
        """A number in the range."""
        if step is None:
            return min(self.draw.uniform(low, high), high)
        return low + step * self.draw.randint(0, round((high - low) / step))


@dataclass(frozen=True)
class Parameter:
    """One setting to try. Either `choices`, or `low` to `high` (included) in steps of `step` (None: continuous)."""

    name: str
    choices: tuple[Setting, ...] | None
    low: int | float | None
    high: int | float | None
    step: int | float | None
    when: Expression | None

    @classmethod
    def of(cls, name: str, section: ParameterSection) -> Self:
        """The parameter that a section of the file describes. Ranges with whole ends step by 1 unless told."""
        choices = tuple(section.choices) if section.choices is not None else None
        step = section.step
        if step is None and isinstance(section.low, int) and isinstance(section.high, int):
            step = 1
        when = parse(section.when) if section.when is not None else None
        return cls(name, choices, section.low, section.high, step, when)

    @property
    def ends(self) -> tuple[int | float, int | float]:
        """Lowest and highest value of a range."""
        if self.low is None or self.high is None:
            raise TypeError(f"{self.name} has choices and no ends")
        return self.low, self.high

    @property
    def whole(self) -> bool:
        """Whether it is a range of whole numbers."""
        return all(isinstance(value, int) for value in (self.low, self.high, self.step))

    @cached_property
    def _steps(self) -> tuple[Fraction, Fraction, int] | None:
        """The lowest value and the step, as they are written, and the number of steps; None where there is no step."""
        if self.choices is not None or self.step is None:
            return None
        low, high, step = (Fraction(str(number)) for number in (*self.ends, self.step))
        return low, step, (high - low) // step

    @cached_property
    def domain(self) -> tuple[Setting, ...] | None:
        """Every value it can take; None when it is continuous or has more than `MAX_DOMAIN` values."""
        if self.choices is not None:
            return self.choices
        if self._steps is None:
            low, high = self.ends
            return (float(low),) if low == high else None
        first, step, last = self._steps
        return tuple(self._number(first + i * step) for i in range(last + 1)) if last < MAX_DOMAIN else None

    def _number(self, exact: Fraction) -> int | float:
        return int(exact) if self.whole else float(exact)

    def offered(self, value: object) -> Setting | None:
        """The value of this parameter that it is, but for rounding; None where it is none of them."""
        if self.choices is not None:
            return next((one for one in self.choices if one == value and type(one) is type(value)), None)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return None
        if self._steps is None:
            low, high = self.ends
            return float(value) if low <= value <= high else None
        if self.whole and not isinstance(value, int):
            return None
        first, step, last = self._steps
        near = first + min(max(round((Fraction(value) - first) / step), 0), last) * step
        return self._number(near) if abs(Fraction(value) - near) <= ROUNDING * step else None

    def written(self, value: Setting) -> Setting:
        """A number of a range with steps as a person writes it (0.7 + 0.1 is less than 0.8); all else as it is."""
        if self._steps is None or (self.whole and isinstance(value, int)):
            return value
        found = self.offered(value)
        return value if found is None else found

    def first_of(self, wanted: Iterable[Setting | None]) -> Setting:
        """The first of these that it can take; else its choice "unset", or its first or lowest value."""
        for value in (*wanted, "unset", *(self.choices or self.ends)):
            if (found := self.offered(value)) is not None:
                return found
        raise ValueError(f"{self.name} has no value")

    def suggest(self, trial: Suggests) -> Setting:
        """The value that the trial's sampler picks."""
        if self.choices is not None:
            return trial.suggest_categorical(self.name, list(self.choices))
        if self.whole:
            return trial.suggest_int(self.name, self.low, self.high, step=self.step)  # type: ignore[arg-type]
        if self._steps is None:
            return trial.suggest_float(self.name, *self.ends, step=None)
        first, step, last = self._steps
        picked = trial.suggest_float(self.name, float(first), float(first + last * step), step=float(step))
        return self.written(picked)


@dataclass(frozen=True)
class Rule:
    """What may not be tried, and why."""

    forbid: Expression
    because: str


@dataclass(frozen=True)
class Workload:
    """What is asked of the server. `weights` sum to 1, one per level of `concurrency`."""

    prompts: str
    max_tokens: int
    temperature: float
    concurrency: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def weight_of(self) -> dict[int, float]:
        """Level → its share of real traffic."""
        return dict(zip(self.concurrency, self.weights, strict=True))


@dataclass(frozen=True)
class Listed:
    """A candidate, and values of the parameters that make it up."""

    candidate: Candidate
    values: Mapping[str, Setting]


class Space:
    """A valid space, as the study uses it. `file` is what was written; everything else follows from it."""

    def __init__(self, file: SpaceFile) -> None:
        self.file = file
        self.name: str = file.name
        self.profile: Profile = file.profile
        self.sampler: Sampler = file.sampler
        self.kind: str = file.engine.kind
        self.model: str = file.engine.model
        self.args: dict[str, Any] = dict(file.engine.args)
        self.env: dict[str, str | None] = dict(file.engine.env)
        self.container: ContainerSection | None = file.engine.container
        self.api_key_env: str | None = file.engine.api_key_env
        self.devices: tuple[str, ...] = tuple(file.engine.devices or ())
        self.launch: LaunchSection = file.engine.launch
        self.simulation: SimulationSection | None = None
        if self.kind == SIMULATED:
            # A model of a machine needs no image and no key, and is told what machine it is as it is told the rest.
            self.container = self.api_key_env = None
            self.simulation = file.simulation or SimulationSection()
            told = self.simulation.model_dump(include={"profile", "noise", "speed"})
            self.args |= {f"simulation.{name}": value for name, value in told.items()}
        self.quality: QualitySection = file.quality
        self.workload = _workload(file)
        self.objective: ObjectiveSection = file.objective
        self.budget: BudgetSection = file.budget
        self.notify: NotifySection | None = file.notify
        self.parameters = in_order([Parameter.of(name, section) for name, section in file.parameters.items()])
        self.rules = tuple(Rule(parse(rule.forbid), rule.because) for rule in file.rules)
        self.baseline = Candidate(self._canonical(dict(file.baseline)))

    def suggest(self, trial: Suggests) -> Candidate:
        """The candidate that a trial's sampler picks: only active parameters are asked for."""
        return self.asked(trial).candidate

    def asked(self, trial: Suggests) -> Listed:
        """That candidate, and what the sampler picked for each parameter that it was asked for."""
        values: dict[str, Setting] = {}
        for parameter in self.parameters:
            if parameter.when is None or self._holds(parameter.when, values):
                values[parameter.name] = parameter.suggest(trial)
        return Listed(Candidate(self._canonical(values)), values)

    def drawn(self, count: int, seed: int = 0) -> list[Candidate]:
        """So many candidates, drawn at random, whatever rules say."""
        draw = Drawn(random.Random(seed))
        return [self.suggest(draw) for _ in range(count)]

    def offered(self, settings: Mapping[str, Setting]) -> dict[str, Setting]:
        """Those of these settings that are values of the parameters."""
        found = ((each.name, each.offered(settings.get(each.name))) for each in self.parameters)
        return {name: value for name, value in found if value is not None}

    def written(self, settings: Mapping[str, Setting]) -> dict[str, Setting]:
        """The settings, with the numbers of ranges as a person writes them."""
        numbers = {each.name: each.written(settings[each.name]) for each in self.parameters if each.name in settings}
        return {**settings, **numbers}

    def near_baseline(self, forced: Mapping[str, Setting]) -> Listed | None:
        """The candidate with these values that is else as the baseline; None where one of them cannot be had so.

        What the baseline does not say is an unset variable, or the first of its values.
        """
        values: dict[str, Setting] = {}
        for parameter in self.parameters:
            if parameter.when is None or self._holds(parameter.when, values):
                wanted = [forced.get(parameter.name), self.baseline.settings.get(parameter.name)]
                values[parameter.name] = parameter.first_of(wanted)
        if any(values.get(name) != value for name, value in forced.items()):
            return None
        return Listed(Candidate(self._canonical(values)), values)

    def forbidden(self, candidate: Candidate) -> str | None:
        """Why a rule rules the candidate out, or cannot be asked of its values; None when none does."""
        values = {**visible(self.args_for(candidate.settings)), **candidate.settings} if self.rules else {}
        for rule in self.rules:
            try:
                holds = rule.forbid.holds(values)
            except ExpressionError as error:
                return f"a rule does not fit {shown(values, rule.forbid.names)}: {error} (rule: {rule.forbid.text})"
            if holds:
                return f"{rule.because} (rule: {rule.forbid.text})"
        return None

    def args_for(self, settings: Mapping[str, Setting], hot: Set[str] = frozenset()) -> dict[str, Any]:
        """What `engine.args` fix for a candidate: all, but for one that is not to speculate what says how to.

        What no running server can be changed in (`hot` names what it can) stays: launched without it, it could not
        serve those that speculate. So does all that a command line of the user's is made of.
        """
        if settings.get("speculation", self.args.get("speculation", "none")) != "none" or self.kind == COMMAND:
            return dict(self.args)
        idle = SPECULATIVE | {"speculation"}
        if any(parameter.name in hot for parameter in self.parameters):
            idle = idle & hot
        return {name: value for name, value in self.args.items() if name not in idle}

    def combinations(self, limit: int = MAX_COMBINATIONS) -> list[Listed] | None:
        """Every combination of values with the candidate that it makes, whatever rules say; None beyond `limit`."""
        found: list[Listed] = []
        for values in self._combinations(0, {}):
            if values is None or len(found) >= limit:
                return None
            found.append(Listed(Candidate(self._canonical(values)), values))
        return found

    def listed(self, limit: int = MAX_COMBINATIONS) -> dict[str, Listed] | None:
        """Every distinct candidate that no rule forbids, by id; None when they cannot be listed within `limit`.

        The baseline is among them only where the parameters make it up.
        """
        found: dict[str, Listed] = {}
        for count, values in enumerate(self._combinations(0, {})):
            if values is None or count >= limit:
                return None
            candidate = Candidate(self._canonical(values))
            if candidate.id not in found and not self.forbidden(candidate):
                found[candidate.id] = Listed(candidate, values)
        return found

    def _combinations(self, index: int, values: dict[str, Setting]) -> Iterator[dict[str, Setting] | None]:
        if index == len(self.parameters):
            yield dict(values)
            return
        parameter = self.parameters[index]
        if parameter.when is not None and not self._holds(parameter.when, values):
            yield from self._combinations(index + 1, values)
            return
        if parameter.domain is None:
            yield None
            return
        for value in parameter.domain:
            yield from self._combinations(index + 1, {**values, parameter.name: value})

    def active(self, parameter: Parameter, settings: Mapping[str, Setting]) -> bool:
        """Whether a parameter's condition holds beside these settings; so where it cannot be asked of their values."""
        try:
            return parameter.when is None or parameter.when.holds({**visible(self.args), **settings})
        except ExpressionError:
            return True

    def _holds(self, condition: Expression, values: Mapping[str, Setting]) -> bool:
        try:
            return condition.holds({**visible(self.args), **values})
        except ExpressionError as error:
            raise UsageError(
                f"the condition '{condition.text}' does not fit {shown(values, condition.names)}: {error}. Correct it, "
                "and begin a new study"
            ) from error

    def _canonical(self, values: Mapping[str, Setting]) -> dict[str, Setting]:
        return canonical(values, self.args)

    @property
    def objective_level(self) -> int | None:
        """The one level that the objective is about; None where it is about all."""
        return _objective_level(self.file)

    @property
    def meaning(self) -> dict[str, Any]:
        """All that a measurement depends on, as it is in effect: all but name, budget, sampler, hook and quality gate.

        Nor does it depend on how long the tuner waits for a server, where it finds a key, or which of several equal
        devices it uses: that is part of a launch.
        """
        file = self.file.model_dump(mode="json")
        del (
            file["name"],
            file["budget"],
            file["sampler"],
            file["notify"],
            file["quality"],
            file["engine"]["launch"],
            file["engine"]["api_key_env"],
            file["engine"]["devices"],
        )
        for name in ("concurrency", "slo"):
            if file["objective"][name] is None:
                del file["objective"][name]
        if file["objective"]["guard"]["tpot_p90_ms"] is None:  # a younger key: what has none is what it was
            del file["objective"]["guard"]["tpot_p90_ms"]
        if self.container is None:
            del file["engine"]["container"]
        if self.simulation is None:
            del file["simulation"]
        else:
            file["simulation"] = self.simulation.model_dump(mode="json")
        workload = self.workload
        file["workload"] = {
            "prompts": workload.prompts,
            "max_tokens": workload.max_tokens,
            "temperature": workload.temperature,
            "concurrency": list(workload.concurrency),
            "weights": [round(weight, 12) for weight in workload.weights],
        }
        return file

    @property
    def fingerprint(self) -> str:
        """Hash of `meaning`: studies of equal fingerprints may be continued with one another's space files."""
        return short_hash(self.meaning)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` reverses it."""
        return self.file.model_dump(mode="json")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The space that `to_dict` wrote."""
        return cls(SpaceFile.model_validate(data))


class Cycle(ExpressionError):
    """Conditions that wait for one another; `names` are the parameters, in a circle."""

    def __init__(self, names: list[str]) -> None:
        if len(names) == 1:
            super().__init__("the condition mentions the parameter itself")
        else:
            super().__init__(f"the conditions of {' and '.join(names)} wait for one another")
        self.names = names


def visible(args: Mapping[str, Any]) -> dict[str, Setting]:
    """The arguments that expressions see: single values."""
    return {name: value for name, value in args.items() if isinstance(value, (bool, int, float, str))}


def shown(values: Mapping[str, Setting], names: Iterable[str]) -> str:
    """The values of these settings, for a person."""
    return ", ".join(f"{name}={values[name]!r}" for name in names if name in values)


def canonical(values: Mapping[str, Setting], args: Mapping[str, Any]) -> dict[str, Setting]:
    """One spelling per candidate: what has no meaning beside the other settings is left out."""
    context = {**visible(args), **values}
    kept = dict(sorted(values.items()))
    if context.get("speculation") == "none":
        kept = {name: value for name, value in kept.items() if name not in SPECULATIVE}
    steps = context.get("num_steps")
    chain = context.get("topk", 1) == 1 and isinstance(steps, int)
    if chain and isinstance(steps, int) and kept.get("num_draft_tokens") == steps + 1:
        del kept["num_draft_tokens"]
    return kept


def in_order(parameters: list[Parameter]) -> tuple[Parameter, ...]:
    """Parameters so that each comes after those which its condition mentions, otherwise as written.

    Raises:
        Cycle: conditions wait for one another.
    """
    waiting = {parameter.name: parameter for parameter in parameters}
    ordered: list[Parameter] = []
    while waiting:
        ready = next(
            (p for p in waiting.values() if p.when is None or not any(name in waiting for name in p.when.names)), None
        )
        if ready is None:
            raise Cycle(_cycle(waiting))
        ordered.append(waiting.pop(ready.name))
    return tuple(ordered)


def _cycle(waiting: Mapping[str, Parameter]) -> list[str]:
    path = [next(iter(waiting))]
    while True:
        when = waiting[path[-1]].when
        assert when is not None
        following = next(name for name in when.names if name in waiting)
        if following in path:
            return path[path.index(following) :]
        path.append(following)


def _objective_level(file: SpaceFile) -> int | None:
    objective = file.objective
    if objective.maximize == "latency":
        return objective.concurrency or 1
    return objective.concurrency if objective.maximize == "throughput" else None


def _workload(file: SpaceFile) -> Workload:
    section = file.workload
    levels = list(section.concurrency)
    weights = section.weights or [1.0] * len(levels)
    max_tokens = section.max_tokens
    if file.profile == "short":
        max_tokens = min(max_tokens, SHORT_MAX_TOKENS)
        if len(levels) > 2:
            at = _objective_level(file)
            kept = [i for i, level in enumerate(levels) if i in (0, len(levels) - 1) or level == at]
            levels, weights = [levels[i] for i in kept], [weights[i] for i in kept]
            if not sum(weights) > 0:
                weights = [1.0] * len(levels)
    total = math.fsum(weights)
    return Workload(
        prompts=section.prompts,
        max_tokens=max_tokens,
        temperature=section.temperature,
        concurrency=tuple(levels),
        weights=tuple(weight / total for weight in weights),
    )


def differences(old: Space, new: Space) -> list[str]:
    """What changed between two spaces, one sentence each; empty when their fingerprints are equal."""
    before, after = _flat(old.meaning), _flat(new.meaning)
    sentences = []
    for key in dict.fromkeys([*before, *after]):
        if key not in after:
            sentences.append(f"{key}: removed (was {before[key]!r})")
        elif key not in before:
            sentences.append(f"{key}: added ({after[key]!r})")
        elif before[key] != after[key]:
            sentences.append(f"{key}: was {before[key]!r}, is now {after[key]!r}")
    return sentences


def _flat(value: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        where = f"{path}.{key}" if path else key
        if isinstance(inner, Mapping) and inner:
            flat.update(_flat(inner, where))
        elif isinstance(inner, list) and inner and isinstance(inner[0], Mapping):
            for i, item in enumerate(inner):
                flat.update(_flat(item, f"{where}[{i}]"))
        elif inner is not None:
            flat[where] = inner
    return flat
