"""What a space file means, beyond its shape: names, conditions, rules, and what the engine knows."""

from __future__ import annotations

import copy
import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import ValidationError

from tuner.engines import nccl
from tuner.engines.base import UNSET, Reconfigurable
from tuner.engines.names import meant
from tuner.errors import UsageError
from tuner.records import Candidate, Setting
from tuner.space.devices import VISIBLE
from tuner.space.document import Document, Path, dotted
from tuner.space.expression import Expression, ExpressionError, parse
from tuner.space.problems import Problem, unknown
from tuner.space.schema import ContainerSection, ObjectiveSection, SpaceFile
from tuner.space.space import SIMULATED, Cycle, Parameter, Space, canonical, in_order, shown, visible

OBJECTIVES = ("speedup", "throughput", "latency", "goodput", "pareto")
ENV_NAME = re.compile(r"env\.[A-Za-z_][A-Za-z0-9_]*")
STUDY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

MOST_SPEEDUP = 20.0
"""A guard beyond this is a percentage, or a slip."""

OF_SCHEDULES = ("disable_batch_threshold", "steps_by_batch")
"""Settings that a study tries by itself, whether they are parameters or not: rules may name them."""

EXHAUSTIVE = 50_000
MOST_RULES = 3
SAMPLES = 2_000


class KnownSetting(Protocol):
    """What an engine says of one of its settings."""

    def problem(self, value: Setting) -> str | None:
        """What is wrong with the value and what would be valid; None when it is fine."""


class EngineFacts(Protocol):
    """What an engine tells about itself without being started."""

    @property
    def settings(self) -> Mapping[str, KnownSetting]:
        """The settings it knows, by neutral name."""

    def problems(self, args: Mapping[str, Any], settings: Mapping[str, Setting]) -> list[str]:
        """Why this combination cannot work; empty when it can."""

    def check_model(self, model: str) -> str | None:
        """A sentence when the model does not exist."""


@dataclass(frozen=True)
class Outside:
    """What a file can be held against. Anything left out is not checked.

    Args:
        engine_for: kind → its facts; raises `UsageError` for an unknown kind.
        check_prompts: raises `UsageError` when there is no such prompt set.
        env_problems: what cannot be in an environment difference, one sentence each.
        container_problems: of a kind of engine and its container section: where in it, and a sentence.
        rule_problems: of the user's log rules, a list or the name of a file: where in them, and a sentence.
    """

    engine_for: Callable[[str], EngineFacts] | None = None
    check_prompts: Callable[[str], object] | None = None
    env_problems: Callable[[Mapping[str, str | None]], list[str]] | None = None
    container_problems: Callable[[str, ContainerSection], list[tuple[Path, str]]] | None = None
    rule_problems: Callable[[Any], list[tuple[Path, str]]] | None = None


class Checker:
    """Collects the problems of one file."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.problems: list[Problem] = list(document.problems)
        self.dropped: set[str] = set()  # parameters that are misshapen: known by name, and not looked at further

    def report(self, path: Path, message: str) -> None:
        """Adds one problem at `path`."""
        self.problems.append(Problem(self.document.line(path), dotted(path), message))

    def shape(self) -> SpaceFile | None:
        """The file in its sections; problems, and what is right of it, when it does not have that shape.

        None when too little is right to look any further.
        """
        if not isinstance(self.document.value, dict):
            self.report((), "the file must hold keys such as name, engine, workload, baseline and parameters")
            return None
        try:
            return SpaceFile.model_validate(self.document.value)
        except ValidationError as error:
            found = error.errors(include_url=False)
            for item in found:
                self._shape_problem(item)
            return self._right_part([tuple(item["loc"]) for item in found])

    def _right_part(self, wrong: Sequence[Path]) -> SpaceFile | None:
        """The file without what is misshapen, so that all else can be checked as well."""
        rest = copy.deepcopy(self.document.value)
        for path in wrong:
            if path[0] == "parameters" and len(path) > 1:
                self.dropped.add(str(path[1]))
            if len(path) > 1 and isinstance(rest.get(path[0]), dict):
                rest[path[0]].pop(path[1], None)
            else:
                rest.pop(path[0], None)
        needed: dict[str, Any] = {"name": "unnamed", "workload": {}, "baseline": {}, "parameters": {}}
        rest = {**needed, **rest}
        if isinstance(rest["workload"], dict):
            rest["workload"] = {"concurrency": [1], **rest["workload"]}
        try:
            return SpaceFile.model_validate(rest)
        except ValidationError:
            return None

    def _shape_problem(self, item: Any) -> None:
        path: Path = tuple(item["loc"])
        kind, message = item["type"], item["msg"]
        if kind == "extra_forbidden":
            parent = _model_at(path[:-1])
            self.report(path, unknown(str(path[-1]), parent))
        elif kind == "missing":
            self.report(path, "is missing")
        elif kind == "too_short":
            self.report(path, "is empty")
        elif kind in ("model_type", "dict_type", "model_attributes_type"):
            self.report(path, "must hold keys, one a line")
        elif kind == "literal_error":
            self.report(path, unknown(str(item["input"]), [part.strip("' ") for part in _options(item)]))
        else:
            self.report(path, message.removeprefix("Value error, ").replace("Input should", "should"))

    def meaning(self, file: SpaceFile, outside: Outside) -> None:
        """Reports what is wrong although the shape is right."""
        if not STUDY_NAME.fullmatch(file.name):
            self.report(("name",), f"'{file.name}' is not usable as a name: letters, digits, '.', '_', '-', at most 64")
        engine = self._engine(file, outside)
        self._names(file, engine)
        self._environment(file, outside)
        self._server(file, outside)
        self._objective(file.objective, file.workload.concurrency)
        if file.budget.launches < 2:
            self.report(("budget", "launches"), "1 launch is only the baseline; at least 2 are needed, 10 to confirm")
        if check_prompts := outside.check_prompts:
            self._guarded(("workload", "prompts"), lambda: check_prompts(file.workload.prompts))
        if not file.parameters and not self.dropped:
            self.report(("parameters",), "is empty")
        parameters = self._parameters(file)
        self._rules(file, parameters or ())
        if engine is not None and nccl.PATH in engine.settings:
            self._nccl(file, parameters or ())
        if not self.problems:
            self._combinations(Space(file), engine)

    def _environment(self, file: SpaceFile, outside: Outside) -> None:
        if outside.env_problems is None:
            return
        for name, value in file.engine.env.items():
            for problem in outside.env_problems({name: value}):
                self.report(("engine", "env", name), problem.partition(": ")[2])
        for name, section in file.parameters.items():
            if name.startswith("env."):
                for i, choice in enumerate(section.choices or ()):
                    for problem in outside.env_problems({name.removeprefix("env."): str(choice)}):
                        self.report(("parameters", name, "choices", i), problem.partition(": ")[2])

    def _server(self, file: SpaceFile, outside: Outside) -> None:
        """The parts of the engine section that are the same for every engine; a simulated one has no use for them."""
        engine = file.engine
        if engine.kind == SIMULATED:
            return
        if engine.api_key_env is not None and not ENV_NAME.fullmatch(f"env.{engine.api_key_env}"):
            self.report(("engine", "api_key_env"), "names the variable that holds the key; this is no such name")
        if engine.devices and (VISIBLE in engine.env or f"env.{VISIBLE}" in file.parameters):
            self.report(("engine", "devices"), f"{VISIBLE} is set by devices, and must not be set otherwise as well")
        if engine.container is not None and outside.container_problems is not None:
            for place, message in outside.container_problems(engine.kind, engine.container):
                self.report(("engine", "container", *place), message)
        if "log_rules" in engine.args and outside.rule_problems is not None:
            for place, message in outside.rule_problems(engine.args["log_rules"]):
                self.report(("engine", "args", "log_rules", *place), message)

    def _guarded(self, path: Path, check: Callable[[], object]) -> None:
        try:
            check()
        except UsageError as error:
            self.report(path, str(error))

    def _engine(self, file: SpaceFile, outside: Outside) -> EngineFacts | None:
        engine: EngineFacts | None = None

        def find() -> None:
            nonlocal engine
            assert outside.engine_for is not None
            engine = outside.engine_for(file.engine.kind)

        if outside.engine_for is not None:
            self._guarded(("engine", "kind"), find)
        if engine is not None and (problem := engine.check_model(file.engine.model)):
            self.report(("engine", "model"), problem)
        if engine is not None:
            # What it says of any other setting may be for lack of the settings; of one of these, of how the candidate
            # speculates, unless it says so of all.
            ways = _ways(file)
            asked = [engine.problems(file.engine.args, {**told}) for told in ways]
            for problem in asked[0]:
                name = problem.partition(":")[0]
                if name in file.engine.args and all(problem in said for said in asked):
                    self.report(("engine", "args", name), problem)
        return engine

    def _names(self, file: SpaceFile, engine: EngineFacts | None) -> None:
        for name in file.parameters:
            if name in file.engine.args:
                self.report(("parameters", name), "is also fixed in engine.args; keep one of them")
        for name in file.baseline:
            if name in file.engine.args:
                self.report(("baseline", name), "is also fixed in engine.args; keep one of them")
        for section, names in (("parameters", file.parameters), ("baseline", file.baseline)):
            for name in names:
                if name.startswith("env."):
                    if not ENV_NAME.fullmatch(name):
                        self.report((section, name), "is not the name of a variable (env.NAME)")
                    elif name.removeprefix("env.") in file.engine.env:
                        self.report((section, name), "is also set in engine.env; keep one of them")
        if engine is not None:
            self._values(file, engine)

    def _values(self, file: SpaceFile, engine: EngineFacts) -> None:
        def check(path: Path, name: str, value: Any) -> None:
            if name.startswith("env."):
                return
            if name not in engine.settings:
                said = meant(file.engine.kind, name) or unknown(name, engine.settings)
                self.report(path[:2] if path[0] != "engine" else path[:3], said)
            elif problem := engine.settings[name].problem(value):
                self.report(path, problem)

        for name, value in file.baseline.items():
            check(("baseline", name), name, value)
        for name, section in file.parameters.items():
            if section.choices is not None:
                for i, value in enumerate(section.choices):
                    check(("parameters", name, "choices", i), name, value)
            else:
                for end in ("low", "high"):
                    check(("parameters", name, end), name, getattr(section, end))

    def _objective(self, objective: ObjectiveSection, levels: Sequence[int]) -> None:
        """Reports an objective that is unknown, or whose parts have no meaning together."""
        kind, at = objective.maximize, objective.concurrency
        path: Path = ("objective",)
        if kind not in OBJECTIVES:
            self.report((*path, "maximize"), unknown(kind, OBJECTIVES))
            return
        if at is not None and kind not in ("throughput", "latency"):
            self.report((*path, "concurrency"), f"has no meaning with '{kind}'; leave it out, or maximize throughput")
        elif at is not None and at not in levels:
            self.report((*path, "concurrency"), f"{at} is not among workload.concurrency ({_listed(levels)})")
        elif kind == "latency" and at is None and 1 not in levels:
            said = f"latency is that of one stream, and 1 is not among workload.concurrency ({_listed(levels)})"
            self.report((*path, "maximize"), f"{said}; add it, or name a level as objective.concurrency")
        if kind == "goodput" and objective.slo is None:
            self.report((*path, "maximize"), "goodput needs objective.slo, such as {ttft_ms: 2000, tpot_ms: 50}")
        if kind != "goodput" and objective.slo is not None:
            self.report((*path, "slo"), f"has no meaning with '{kind}'; maximize goodput, or use guard.ttft_p90_ms")
        if kind == "pareto" and len(levels) < 2:
            self.report((*path, "maximize"), "pareto weighs levels against one another, and there is only one")
        guard, slo = objective.guard, objective.slo
        for name in ("ttft", "tpot"):
            limit = getattr(guard, f"{name}_p90_ms")
            allowed = getattr(slo, f"{name}_ms") if slo is not None else None
            if limit is not None and allowed is not None and limit < allowed:
                said = f"{limit:g} at every level contradicts slo.{name}_ms {allowed:g}, which allows more"
                self.report((*path, "guard", f"{name}_p90_ms"), f"{said}; keep one of them")
        if guard.min_speedup is not None and guard.min_speedup > MOST_SPEEDUP:
            said = f"{guard.min_speedup:g} at every level: no setting makes a server so much faster"
            self.report((*path, "guard", "min_speedup"), f"{said}; 0.97 means to lose at most 3 % anywhere")

    def _expression(self, path: Path, text: str, known: Sequence[str]) -> Expression | None:
        try:
            expression = parse(text)
        except ExpressionError as error:
            self.report(path, f"'{text}' {error}")
            return None
        wrong = [name for name in expression.names if name not in known]
        if not wrong and any(name in self.dropped for name in expression.names):
            return None  # what it can mean depends on what is reported already
        for name in wrong:
            hint = " (write text in quotes)" if re.search(rf"[=!]=\s*{re.escape(name)}\b", text) else ""
            self.report(path, unknown(name, known) + hint)
        return None if wrong else expression

    def _parameters(self, file: SpaceFile) -> tuple[Parameter, ...] | None:
        """The parameters in order; None when a condition is wrong."""
        known = [*file.parameters, *self.dropped, *visible(file.engine.args)]
        good = True
        for name, when in self._conditions(file):
            if self._expression(("parameters", name, "when"), when, known) is None:
                good = False
        if not good:
            return None
        try:
            parameters = in_order([Parameter.of(name, section) for name, section in file.parameters.items()])
        except Cycle as error:
            self.report(("parameters", error.names[0], "when"), str(error))
            return None
        for parameter in parameters:
            if parameter.when is not None:
                path: Path = ("parameters", parameter.name, "when")
                good &= self._can_hold(path, parameter.when, parameters, file.engine.args)
        return parameters if good else None

    def _nccl(self, file: SpaceFile, parameters: Sequence[Parameter]) -> None:
        """NCCL is searched only where it is known to add up what a decode step computed, and by values that it has."""
        fixed = visible(file.engine.args)
        baseline = {**fixed, **file.baseline}
        for name in nccl.searched([*file.baseline]):
            value = file.baseline[name]
            bare = name.removeprefix("env.")
            if value != UNSET:
                problem = nccl.idle(bare, baseline.get(nccl.PATH)) or nccl.value_problem(bare, value)
                if problem:
                    self.report(("baseline", name), f"{problem}. What every launch needs stands in engine.env")
        for parameter in parameters:
            if not nccl.searched([parameter.name]):
                continue
            bare = parameter.name.removeprefix("env.")
            for i, value in enumerate(parameter.choices or parameter.ends):
                if value != UNSET and (problem := nccl.value_problem(bare, value)):
                    place: Path = ("choices", i) if parameter.choices else (("low", "high")[i],)
                    self.report(("parameters", parameter.name, *place), problem)
            found = assignments([parameter.name, nccl.PATH], parameters, file.engine.args)[0]
            beside = {values.get(nccl.PATH) for values in found if values.get(parameter.name, UNSET) != UNSET}
            problems = [problem for path in sorted(beside, key=str) if (problem := nccl.idle(bare, path))]
            if problems:
                self.report(("parameters", parameter.name), problems[0])

    def _conditions(self, file: SpaceFile) -> Iterator[tuple[str, str]]:
        """Parameter and condition, also of parameters that are misshapen otherwise."""
        for name, section in file.parameters.items():
            if section.when is not None:
                yield name, section.when
        for name in sorted(self.dropped):
            raw = self.document.value["parameters"][name]
            if isinstance(raw, dict) and isinstance(raw.get("when"), str):
                yield name, raw["when"]

    def _can_hold(self, path: Path, when: Expression, parameters: Sequence[Parameter], args: Mapping[str, Any]) -> bool:
        """Reports a condition that never holds; returns whether it fits all values, else nothing can hang on it."""
        try:
            proven = never_holds(when, parameters, args)
        except ExpressionError as error:
            self.report(path, f"'{when.text}': {error}")
            return False
        if proven:
            fixed = [f"{name} is fixed to {args[name]!r} in engine.args" for name in when.names if name in args]
            why = f"; {', '.join(fixed)}" if fixed else ""
            self.report(path, f"'{when.text}' can never hold with the values given{why}")
        return True

    def _rules(self, file: SpaceFile, parameters: Sequence[Parameter]) -> None:
        known = [*file.parameters, *self.dropped, *visible(file.engine.args)]
        known += [name for name in OF_SCHEDULES if name not in known]
        for i, rule in enumerate(file.rules):
            path: Path = ("rules", i, "forbid")
            expression = self._expression(path, rule.forbid, known)
            if expression is None:
                continue
            try:
                for values in assignments(expression.names, parameters, file.engine.args)[0]:
                    expression.holds(values)
            except ExpressionError as error:
                self.report(path, f"'{rule.forbid}': {error}")
                continue
            baseline = {**visible(file.engine.args), **canonical(file.baseline, file.engine.args)}
            if problem := _misfit(expression, baseline):
                self.report(path, problem)

    def _combinations(self, space: Space, engine: EngineFacts | None) -> None:
        hot: frozenset[str] = engine.hot if isinstance(engine, Reconfigurable) else frozenset()

        def problems(candidate: Candidate) -> list[str]:
            assert engine is not None
            settings = _engine_settings(candidate)
            return engine.problems(space.args_for(settings, hot), settings)

        if engine is not None:
            for problem in problems(space.baseline):
                self.report(_place(problem, space), problem)
        listed = space.listed()
        if listed is None and space.sampler == "exhaustive":
            self.report(("sampler",), "'exhaustive' needs parameters that can be listed; give ranges a step, or fewer")
        if listed is None or self.problems:
            return
        others = [each.candidate for i, each in listed.items() if i != space.baseline.id]
        path: Path = ("rules",) if space.rules else ("parameters",)
        if not others:
            self.report(path, f"no candidate is left besides the baseline: {_why_none(space)}")
        elif engine is not None:
            refused = [problems(candidate) for candidate in others]
            if all(refused):
                self.report(("parameters",), f"the engine takes none of the candidates: {refused[0][0]}")


def _why_none(space: Space) -> str:
    """What rules out every combination, the commonest first."""
    combinations = space.combinations() or []
    why = Counter(rule for each in combinations if (rule := space.forbidden(each.candidate)))
    if not why:
        return "the parameters make up no other"
    said = "; ".join(f"{count} by: {rule}" for rule, count in why.most_common(MOST_RULES))
    more = f"; {len(why) - MOST_RULES} more" if len(why) > MOST_RULES else ""
    return f"of {len(combinations)} combinations, {said}{more}"


def _misfit(rule: Expression, baseline: Mapping[str, Setting]) -> str | None:
    """What is wrong where a rule cannot be asked of the baseline, whose values the parameters need not offer."""
    try:
        rule.holds(baseline)
    except ExpressionError as error:
        words = [name for name in rule.names if isinstance(baseline.get(name), str)]
        blamed = next((name for name in words if f"'{baseline[name]}'" in str(error)), None)
        advice = f"{blamed} != {baseline[blamed]!r} and ({rule.text})" if blamed else "when it is meant"
        said = f"'{rule.text}' does not fit the baseline ({shown(baseline, rule.names)}): {error}"
        return f"{said}; write {advice}, or change the baseline"
    return None


def _listed(levels: Sequence[int]) -> str:
    return ", ".join(map(str, levels))


def _engine_settings(candidate: Candidate) -> dict[str, Setting]:
    return {name: value for name, value in candidate.settings.items() if not name.startswith("env.")}


def _ways(file: SpaceFile) -> list[dict[str, Setting]]:
    """The ways to speculate that the file has, as settings: those of its baseline and of its parameters."""
    asked = file.parameters.get("speculation")
    values = [file.baseline.get("speculation"), *((asked.choices or ()) if asked is not None else ())]
    told = [value for value in values if isinstance(value, str)]
    # What is wrong for all that speculate is wrong, whatever plain decoding has no use for.
    return [{"speculation": value} for value in [v for v in told if v != "none"] or told] or [{}]


def _place(problem: str, space: Space) -> Path:
    """Where what an engine complains about stands: its sentences begin with the name of the setting."""
    name = problem.partition(":")[0]
    if name.startswith("args.") or name in space.args:
        return ("engine", "args", name.removeprefix("args."))
    return ("baseline", name) if name in space.baseline.settings else ("baseline",)


def assignments(
    names: Sequence[str], parameters: Sequence[Parameter], args: Mapping[str, Any]
) -> tuple[Iterator[dict[str, Setting]], bool]:
    """Values that the named parameters, and those they depend on, can take together; and whether these are all.

    Too many, or a continuous one among them: a fixed sample instead, range ends included.
    """
    needed = _ancestors(names, parameters)
    involved = [parameter for parameter in parameters if parameter.name in needed]
    domains = [parameter.domain for parameter in involved]
    size = math.prod(len(domain) for domain in domains if domain is not None)
    complete = None not in domains and size <= EXHAUSTIVE
    fixed = visible(args)

    def conditioned(values: Sequence[Setting]) -> dict[str, Setting]:
        active = dict(fixed)
        for parameter, value in zip(involved, values, strict=True):
            if parameter.when is None or parameter.when.holds(active):
                active[parameter.name] = value
        return active

    if complete:
        product = itertools.product(*(domain for domain in domains if domain is not None))
        return (conditioned(values) for values in product), True
    rng = random.Random(0)
    return (conditioned([_drawn(parameter, rng) for parameter in involved]) for _ in range(SAMPLES)), False


def _drawn(parameter: Parameter, rng: random.Random) -> Setting:
    if parameter.choices is not None:
        return rng.choice(parameter.choices)
    low, high = parameter.ends
    corner = rng.random()
    if corner < 0.2:
        return low if corner < 0.1 else high
    if parameter.step is None:
        return rng.uniform(low, high)
    return parameter.written(low + parameter.step * rng.randint(0, round((high - low) / parameter.step)))


def _ancestors(names: Sequence[str], parameters: Sequence[Parameter]) -> set[str]:
    by_name = {parameter.name: parameter for parameter in parameters}
    needed: set[str] = set()
    queue = [name for name in names if name in by_name]
    while queue:
        name = queue.pop()
        if name not in needed:
            needed.add(name)
            when = by_name[name].when
            queue.extend(other for other in (when.names if when else ()) if other in by_name)
    return needed


def never_holds(when: Expression, parameters: Sequence[Parameter], args: Mapping[str, Any]) -> bool:
    """Whether it is certain that the condition is false for all values. Where they cannot be listed, it is not."""
    values, complete = assignments(when.names, parameters, args)
    results = [when.holds(each) for each in values]  # all of them, so that an error in any is found
    return complete and not any(results)


def _options(item: Any) -> list[str]:
    return re.split(r", | or ", item["ctx"]["expected"])


def _model_at(path: Path) -> list[str]:
    """The keys that the schema knows at `path`."""
    model: Any = SpaceFile
    for part in path:
        if isinstance(part, int) or not (hasattr(model, "model_fields") and part in model.model_fields):
            continue
        annotation = model.model_fields[part].annotation
        inner = [arg for arg in getattr(annotation, "__args__", ()) if hasattr(arg, "model_fields")]
        model = annotation if hasattr(annotation, "model_fields") else inner[0] if inner else model
    return list(model.model_fields)
