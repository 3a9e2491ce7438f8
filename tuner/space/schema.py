"""The shape of a space file: sections, keys, kinds of values. What they mean together is checked in `check.py`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from tuner.records import Setting
from tuner.space.devices import device_names

Profile = Literal["short", "full"]
Sampler = Literal["model", "tpe", "gp", "nsga2", "random", "exhaustive"]
"""What proposes candidates: the model of speculation, Optuna's samplers, or each in turn."""


def _setting(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str)):
        return value
    if value is None:
        raise ValueError("has no value; write one, or 'none' in the sense of off, or leave the key out")
    if isinstance(value, dict) and value and all(type(x) is int for pair in value.items() for x in pair):
        # A schedule (steps_by_batch) is one value: its text is what tells two of them apart.
        return ",".join(f"{size}:{steps}" for size, steps in sorted(value.items()))
    raise ValueError("must be one number, text, boolean, or a schedule of whole numbers ({1: 0, 8: 3})")


def _argument(value: Any) -> Any:
    if isinstance(value, list):
        return [_entry(item) if isinstance(item, dict) else _setting(item) for item in value]
    return _setting(value)


def _entry(value: dict[str, Any]) -> dict[str, Any]:
    """A mapping within a list: a log rule."""
    return {name: [*map(_setting, one)] if isinstance(one, list) else _setting(one) for name, one in value.items()}


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"must be a number, not {value!r}")
    return value


def _whole(value: Any) -> Any:
    if isinstance(value, bool) or not (isinstance(value, int) or (isinstance(value, float) and value.is_integer())):
        raise ValueError(f"must be a whole number, not {value!r}")
    return int(value)


def _text(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    return str(value)


def _positive(value: float) -> float:
    if not value > 0:
        raise ValueError(f"must be above 0, not {value}")
    return value


def _at_most(limit: float) -> AfterValidator:
    def check(value: float) -> float:
        if value > limit:
            raise ValueError(f"must be at most {limit:g}, not {value:g}")
        return value

    check.limit = limit  # type: ignore[attr-defined]  # read by the reference of the space file
    return AfterValidator(check)


SettingValue = Annotated[Any, BeforeValidator(_setting)]
ArgumentValue = Annotated[Any, BeforeValidator(_argument)]
Number = Annotated[float, BeforeValidator(_number)]
Whole = Annotated[int, BeforeValidator(_whole)]
PositiveWhole = Annotated[int, BeforeValidator(_whole), AfterValidator(_positive)]
PositiveNumber = Annotated[float, BeforeValidator(_number), AfterValidator(_positive)]
EnvValue = Annotated[str | None, BeforeValidator(_text)]
NumberAsWritten = Annotated[int | float, BeforeValidator(_number)]


class Section(BaseModel):
    """A mapping of the file in which every key is known."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _gpus(value: Any) -> Any:
    if value is None or value == "all":
        return value
    if isinstance(value, list):
        return [_whole(index) for index in value]
    raise ValueError(f"must be all or a list of indices such as [0, 1], not {value!r}")


def _devices(value: Any) -> Any:
    return list(device_names(value)) or None


Text = Annotated[str, BeforeValidator(_text)]


class ContainerSection(Section):
    """The server runs in a container of this image.

    `mounts` are HOST:CONTAINER, with `:ro` behind it where it is only read. `gpus` is `all` or a list of indices.
    With the network `host` the server listens on this machine as any other; with `bridge` its port is published.
    """

    runtime: Literal["docker", "podman"] = "docker"
    image: str
    mounts: list[str] = Field(default_factory=list)
    gpus: Annotated[Any, BeforeValidator(_gpus)] = None
    devices: list[str] = Field(default_factory=list)
    shm_size: Text | None = None
    network: Literal["host", "bridge"] = "host"
    init: bool = True
    run_args: list[Text] = Field(default_factory=list)


class LaunchSection(Section):
    """How long a server may take, in seconds.

    `stall_s` without a sign of life before it is ready, `startup_s` to be ready at all, `smoke_s` for its first
    completion, `grace_s` between SIGTERM and SIGKILL, `token_stall_s` without any token while it is measured.
    """

    stall_s: PositiveNumber = 120.0
    startup_s: PositiveNumber = 3600.0
    smoke_s: PositiveNumber = 120.0
    grace_s: PositiveNumber = 15.0
    token_stall_s: PositiveNumber = 30.0


class EngineSection(Section):
    """Which server is tuned. `args` are fixed settings; `env` values set a variable, null removes it.

    `api_key_env` names the variable that holds the key which the server wants; only its name is kept. `devices` are
    the only ones that servers may use; they are the machine's, not part of what is studied.
    """

    kind: str
    model: str
    args: dict[str, ArgumentValue] = Field(default_factory=dict)
    env: dict[str, EnvValue] = Field(default_factory=dict)
    container: ContainerSection | None = None
    api_key_env: str | None = None
    devices: Annotated[list[str] | None, BeforeValidator(_devices)] = None
    launch: LaunchSection = Field(default_factory=LaunchSection)


class WorkloadSection(Section):
    """What is asked of the server. `weights` is the share of real traffic at each level; equal when left out."""

    prompts: str = "mixed"
    max_tokens: Annotated[PositiveWhole, _at_most(1_000_000)] = 200
    temperature: Annotated[float, BeforeValidator(_number), Field(ge=0), _at_most(100)] = 0.0
    concurrency: Annotated[list[Annotated[PositiveWhole, _at_most(4096)]], Field(min_length=1)]
    weights: list[Annotated[float, BeforeValidator(_number), Field(ge=0), _at_most(1e6)]] | None = None

    @model_validator(mode="after")
    def _levels(self) -> WorkloadSection:
        doubled = sorted({level for level in self.concurrency if self.concurrency.count(level) > 1})
        if doubled:
            raise ValueError(f"concurrency: {doubled[0]} is given twice")
        if self.weights is not None and len(self.weights) != len(self.concurrency):
            raise ValueError(
                f"weights: {len(self.weights)} weights for {len(self.concurrency)} levels of concurrency; give one each"
            )
        if self.weights is not None and not sum(self.weights) > 0:
            raise ValueError("weights: all are 0")
        return self


class ParameterSection(Section):
    """One setting to try: `choices`, or a range from `low` to `high` (both included) in steps of `step`."""

    choices: list[SettingValue] | None = None
    low: NumberAsWritten | None = None
    high: NumberAsWritten | None = None
    step: Annotated[int | float, BeforeValidator(_number), AfterValidator(_positive)] | None = None
    when: str | None = None

    @model_validator(mode="after")
    def _domain(self) -> ParameterSection:
        if self.choices is not None:
            if {self.low, self.high, self.step} != {None}:
                raise ValueError("give either choices, or low and high, not both")
            _check_choices(self.choices)
            return self
        if self.low is None or self.high is None:
            raise ValueError("needs choices, or both low and high")
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        if self.step is not None:
            steps = (self.high - self.low) / self.step
            if abs(steps - round(steps)) > 1e-9:
                last = self.low + int(steps) * self.step
                raise ValueError(
                    f"high {self.high} is not reached from {self.low} in steps of {self.step}; {last:g} is"
                )
        return self


def _check_choices(choices: list[Setting]) -> None:
    if not choices:
        raise ValueError("choices is empty; list at least one value")
    for i, value in enumerate(choices):
        for other in choices[:i]:
            if value == other and type(value) is type(other):
                raise ValueError(f"choice {value!r} is given twice")
            if value == other:  # True == 1 == 1.0: no sampler and no database keeps them apart
                raise ValueError(f"choices {other!r} and {value!r} are the same to a sampler; keep one")


class RuleSection(Section):
    """What may not be tried, and why."""

    forbid: str
    because: str


class GuardSection(Section):
    """What a winner may not give up at any level: the least speed-up, the longest p90 times to the first token and for
    each further one."""

    min_speedup: PositiveNumber | None = 0.97
    ttft_p90_ms: PositiveNumber | None = None
    tpot_p90_ms: PositiveNumber | None = None


class SloSection(Section):
    """What nine in ten requests must keep, for `goodput`: to the first token, for each further one, to the end."""

    ttft_ms: PositiveNumber | None = None
    tpot_ms: PositiveNumber | None = None
    e2e_ms: PositiveNumber | None = None

    @model_validator(mode="after")
    def _some(self) -> SloSection:
        if self.ttft_ms is None and self.tpot_ms is None and self.e2e_ms is None:
            raise ValueError("is empty; give ttft_ms, tpot_ms or e2e_ms")
        if self.e2e_ms is not None and self.ttft_ms is not None and self.e2e_ms < self.ttft_ms:
            said = f"e2e_ms {self.e2e_ms:g} and ttft_ms {self.ttft_ms:g} contradict one another"
            raise ValueError(f"{said}: no request ends before its first token")
        return self


class ObjectiveSection(Section):
    """What is maximised. `guard` limits hold at every level.

    `concurrency` is the one level that `throughput` (all of them without it) and `latency` (1 without it) are about.
    """

    maximize: str = "speedup"
    concurrency: PositiveWhole | None = None
    slo: SloSection | None = None
    guard: GuardSection = Field(default_factory=GuardSection)


class BudgetSection(Section):
    """Where the search ends, whichever comes first. Totals: a study that is continued does not start over."""

    launches: PositiveWhole = 24
    candidates: PositiveWhole = 200
    hours: PositiveNumber | None = None


class NotifySection(Section):
    """Whom to tell when a study ends, stops or needs a person: a command (JSON on its standard input), or a URL (POST).

    `${NAME}` in a URL is the environment variable of that name, so that a secret address stands in no file.
    """

    command: Annotated[list[Annotated[str, BeforeValidator(_text)]], Field(min_length=1)] | None = None
    url: str | None = None
    timeout_s: PositiveNumber = 10.0

    @model_validator(mode="after")
    def _one(self) -> NotifySection:
        if (self.command is None) == (self.url is None):
            raise ValueError("give either command (a list of words) or url")
        if self.url is not None and not self.url.startswith(("http://", "https://", "${")):
            raise ValueError(f"url must begin with http:// or https://, not {self.url!r}")
        return self


class SimulationSection(Section):
    """The machine that `engine.kind: simulated` puts in the engine's place; without effect on any other kind.

    `noise` is a factor on the usual one. With the clock `virtual` blocks come straight from the model and a study takes
    seconds; with `real` a server answers over HTTP, `speed` times as fast as the machine would.
    """

    profile: str = "pcie_blackwell_8gpu"
    noise: Annotated[float, BeforeValidator(_number), Field(ge=0), _at_most(100)] = 1.0
    clock: Literal["real", "virtual"] = "real"
    speed: PositiveNumber = 1.0


class QualitySection(Section):
    """How answers are held against the baseline's in the confirmation: so many held-out prompts, greedy, one at a time
    and then as many at once as the highest level of concurrency has.

    A candidate that answers otherwise than rounding explains, or that is lossy by its settings, wins only with
    `allow_lossy`. `check_command` gets the answers as JSON on its standard input and objects by a status other than 0.
    """

    prompts: Annotated[Whole, Field(ge=0), _at_most(1000)] = 8
    max_tokens: Annotated[PositiveWhole, _at_most(4096)] = 64
    allow_lossy: bool = False
    check_command: Annotated[list[Text], Field(min_length=1)] | None = None


class SpaceFile(Section):
    """A whole space file."""

    name: str
    engine: EngineSection
    workload: WorkloadSection
    baseline: dict[str, SettingValue]
    parameters: dict[str, ParameterSection]
    rules: list[RuleSection] = Field(default_factory=list)
    objective: ObjectiveSection = Field(default_factory=ObjectiveSection)
    budget: BudgetSection = Field(default_factory=BudgetSection)
    profile: Profile = "full"
    sampler: Sampler = "model"
    notify: NotifySection | None = None
    simulation: SimulationSection | None = None
    quality: QualitySection = Field(default_factory=QualitySection)
