import random
from decimal import Decimal

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.errors import UsageError
from tuner.records import Candidate
from tuner.space import differences, find_space, load_space, parse_space, shipped

TEXT = """\
name: tree
engine: {kind: fake, model: m, args: {tp: 2}}
workload: {concurrency: [1, 8, 32], max_tokens: 200, weights: [2, 1, 1]}
baseline: {speculation: none}
parameters:
  topk:             {choices: [1, 2, 4], when: speculation == 'eagle3'}
  speculation:      {choices: [none, ngram, eagle3]}
  num_steps:        {low: 1, high: 3, when: speculation != 'none'}
  num_draft_tokens: {choices: [2, 4, 8], when: speculation == 'eagle3'}
  env.NCCL_PROTO:   {choices: [unset, LL], when: tp > 1}
rules:
  - {forbid: topk > 1 and num_draft_tokens > 1 + topk + (num_steps - 1) * topk**2, because: the tree is too small}
"""


@pytest.fixture
def space():
    return parse_space(TEXT)


class Random:
    """A trial that answers at random and remembers what it was asked."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.asked = []

    def suggest_categorical(self, name, choices):
        self.asked.append(name)
        return self.rng.choice(choices)

    def suggest_int(self, name, low, high, *, step=1):
        self.asked.append(name)
        return self.rng.randrange(low, high + 1, step)

    def suggest_float(self, name, low, high, *, step=None):
        self.asked.append(name)
        return self.rng.uniform(low, high)


def test_only_active_parameters_are_asked_for_and_kept(space):
    for seed in range(200):
        trial = Random(seed)
        settings = space.suggest(trial).settings
        assert set(settings) <= set(trial.asked)
        if settings["speculation"] == "none":
            assert set(settings) == {"speculation", "env.NCCL_PROTO"}
        assert ("topk" in settings) == (settings["speculation"] == "eagle3")


def test_a_parameter_may_depend_on_one_that_is_written_below_it(space):
    assert [p.name for p in space.parameters].index("speculation") < [p.name for p in space.parameters].index("topk")


def test_every_suggestion_is_listed_or_forbidden_and_every_listed_one_is_suggested(space):
    suggested = {}
    for seed in range(3000):
        candidate = space.suggest(Random(seed))
        suggested[candidate.id] = candidate
    allowed = {i for i, candidate in suggested.items() if not space.forbidden(candidate)}
    assert allowed == set(space.listed())
    assert "too small" in space.forbidden(next(c for i, c in suggested.items() if i not in allowed))


def test_listed_values_make_up_the_candidate_again(space):
    for listed in space.listed().values():
        assert space.suggest(optuna.trial.FixedTrial(dict(listed.values))).id == listed.candidate.id


def test_a_chain_that_says_its_draft_tokens_is_the_chain_that_does_not(space):
    said = {"speculation": "eagle3", "topk": 1, "num_steps": 3, "num_draft_tokens": 4, "env.NCCL_PROTO": "LL"}
    candidate = space.suggest(optuna.trial.FixedTrial(said))
    assert "num_draft_tokens" not in candidate.settings
    other = space.suggest(optuna.trial.FixedTrial({**said, "num_draft_tokens": 8}))
    assert other.settings["num_draft_tokens"] == 8


def test_without_speculation_its_settings_make_no_difference():
    text = TEXT.replace(", when: speculation != 'none'", "")
    trials = [{"speculation": "none", "num_steps": n, "env.NCCL_PROTO": "LL"} for n in (1, 2, 3)]
    assert len({parse_space(text).suggest(optuna.trial.FixedTrial(t)).id for t in trials}) == 1


def test_a_candidate_does_not_depend_on_the_order_of_its_settings():
    assert Candidate({"a": 1, "b": 2}).id == Candidate({"b": 2, "a": 1}).id


def test_a_continuous_space_cannot_be_listed():
    text = TEXT.replace("{choices: [unset, LL], when: tp > 1}", "{low: 0.1, high: 0.9}").replace(
        "env.NCCL_PROTO", "mem"
    )
    assert parse_space(text).listed() is None


def test_a_float_range_with_a_step_keeps_to_it():
    text = TEXT.replace("{choices: [unset, LL], when: tp > 1}", "{low: 0.5, high: 1, step: 0.25}").replace(
        "env.NCCL_PROTO", "mem"
    )
    mem = next(p for p in parse_space(text).parameters if p.name == "mem")
    assert mem.domain == (0.5, 0.75, 1.0)


RANGE = """\
name: ranged
engine: {{kind: fake, model: m}}
workload: {{concurrency: [1]}}
baseline: {{mem: {low}}}
parameters: {{mem: {{low: {low}, high: {high}, step: {step}}}}}
"""


@settings(max_examples=60, deadline=None)
@given(
    low=st.decimals(-100, 100, allow_nan=False, places=3),
    step=st.decimals(Decimal("0.001"), 10, allow_nan=False, places=3),
    count=st.integers(1, 60),
    seed=st.integers(0, 2**31),
)
def test_a_float_range_has_the_decimals_that_a_person_writes_whoever_asks_for_them(low, step, count, seed):
    decimals = [low + i * step for i in range(count + 1)]
    values = tuple(float(each) for each in decimals)
    space = parse_space(RANGE.format(low=low, high=decimals[-1], step=step))
    (mem,) = space.parameters
    assert mem.domain == values
    # From either end, in binary sums, which drift.
    assert tuple(mem.written(values[0] + i * float(step)) for i in range(count + 1)) == values
    assert tuple(mem.written(values[-1] - i * float(step)) for i in range(count + 1)) == values[::-1]
    assert [mem.offered(value) for value in values] == list(values)
    assert mem.offered(values[0] + float(step) / 2) is None
    assert mem.offered(values[-1] + float(step)) is None
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    assert space.suggest(study.ask()).settings["mem"] in values
    assert {candidate.settings["mem"] for candidate in space.drawn(20, seed)} <= set(values)
    kept = optuna.distributions.FloatDistribution(values[0], values[-1], step=float(step))
    for value in values:
        optuna.trial.create_trial(value=0.0, params={"mem": value}, distributions={"mem": kept})


@pytest.mark.parametrize(
    ("low", "high", "values"),
    [(0.55, 0.85, (0.55, 0.65, 0.75, 0.85)), (0.7, 0.9, (0.7, 0.8, 0.9)), (0.6, 0.9, (0.6, 0.7, 0.8, 0.9))],
)
def test_no_value_of_a_range_is_above_its_end_and_each_has_one_spelling(low, high, values):
    space = parse_space(RANGE.format(low=low, high=high, step=0.1), overrides=(f"baseline.mem={values[1]}",))
    assert [each.candidate.settings["mem"] for each in space.listed().values()] == list(values)
    assert space.baseline.id in space.listed()


def test_a_step_that_misses_the_end_by_a_rounding_does_not_go_beyond_it():
    space = parse_space(RANGE.format(low=0, high=1, step="0.333333333334"))
    (mem,) = space.parameters
    assert mem.domain == (0.0, 0.333333333334, 0.666666666668)
    assert {candidate.settings["mem"] for candidate in space.drawn(50)} == set(mem.domain)


def test_the_full_profile_is_what_the_file_says(space):
    assert space.profile == "full"
    assert space.workload.concurrency == (1, 8, 32)
    assert space.workload.weights == (0.5, 0.25, 0.25)
    assert space.workload.max_tokens == 200


def test_the_short_profile_keeps_the_first_and_last_level_and_64_tokens():
    short = parse_space(TEXT, overrides=["profile=short"])
    assert short.workload.concurrency == (1, 32)
    assert short.workload.weights == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert short.workload.max_tokens == 64


def test_a_space_survives_being_stored(space):
    again = type(space).from_dict(space.to_dict())
    assert again.fingerprint == space.fingerprint
    assert again.baseline.id == space.baseline.id
    assert again.listed().keys() == space.listed().keys()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("workload.concurrency=[1, 8]", "workload.concurrency: was [1, 8, 32], is now [1, 8]"),
        ("parameters.num_steps.high=2", "parameters.num_steps.high: was 3, is now 2"),
        ("parameters.new={choices: [1]}", "parameters.new.choices: added ([1])"),
        ("engine.model=other", "engine.model: was 'm', is now 'other'"),
        ("profile=short", "profile: was 'full', is now 'short'"),
        ("objective.guard.ttft_p90_ms=5", "objective.guard.ttft_p90_ms: added (5.0)"),
        (
            "parameters.env.NCCL_PROTO.choices=[LL]",
            "parameters.env.NCCL_PROTO.choices: was ['unset', 'LL'], is now ['LL']",
        ),
    ],
)
def test_what_changed_is_said_in_words(space, override, says):
    changed = parse_space(
        TEXT, overrides=[override, "workload.weights=null"] if "concurrency" in override else [override]
    )
    assert changed.fingerprint != space.fingerprint
    assert says in differences(space, changed)


def test_name_and_budget_do_not_change_what_is_measured(space):
    other = parse_space(TEXT, overrides=["name=other", "budget.launches=50"])
    assert other.fingerprint == space.fingerprint
    assert differences(space, other) == []


def test_a_bare_name_finds_what_ships_and_a_file_here_goes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_space("quickstart.yaml") == find_space("quickstart") == shipped()["quickstart.yaml"]
    (tmp_path / "quickstart.yaml").write_text(TEXT)
    assert load_space("quickstart.yaml").name == "tree"
    with pytest.raises(UsageError, match=r"did you mean 'quickstart\.yaml'"):
        find_space("quickstrt.yaml")
    with pytest.raises(UsageError, match="folder"):
        find_space(tmp_path)


def test_the_quickstart_stays_a_matter_of_minutes():
    quick = load_space(shipped()["quickstart.yaml"])
    assert quick.profile == "short"
    assert quick.workload.concurrency == (1, 8)
    assert (quick.budget.launches, quick.budget.candidates) == (10, 6)
