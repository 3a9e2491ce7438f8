"""Bad space files: every problem at once, each with its line and, where there is one, the nearest valid name."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.trial import FixedTrial

from tuner.engines.base import env_problems, get_engine
from tuner.errors import UsageError
from tuner.records import Candidate
from tuner.space import Outside, SpaceProblems, parse_space

GOOD = """\
name: toy
engine: {kind: fake, model: m, args: {tp: 1}}
workload: {concurrency: [1, 8]}
baseline: {speculation: none}
parameters:
  speculation: {choices: [none, ngram]}
  num_steps: {low: 1, high: 4, when: speculation != 'none'}
"""


class KnownSetting:
    def __init__(self, *valid):
        self.valid = valid

    def problem(self, value):
        return None if value in self.valid else f"{value!r} is not valid; valid: {', '.join(map(str, self.valid))}"


class FakeEngine:
    settings = {  # noqa: RUF012
        "speculation": KnownSetting("none", "ngram"),
        "num_steps": KnownSetting(*range(1, 9)),
        "topk": KnownSetting(1, 2, 4),
    }

    def problems(self, args, settings):
        if settings.get("speculation") == "ngram" and "num_steps" not in settings:
            return ["speculation: ngram cannot be the baseline here"]
        return ["num_steps: 8 never works"] if settings.get("num_steps") == 8 else []

    def check_model(self, model):
        return None if model == "m" else f"model '{model}' does not exist"


def engine_for(kind):
    if kind != "fake":
        raise UsageError(f"engine '{kind}' is unknown; valid: fake")
    return FakeEngine()


def check_prompts(name):
    if name != "mixed":
        raise UsageError(f"no prompt set '{name}'")


OUTSIDE = Outside(engine_for, check_prompts)


def problems(text, *overrides):
    with pytest.raises(SpaceProblems) as caught:
        parse_space(text, source="toy.yaml", overrides=overrides, outside=OUTSIDE)
    assert caught.value.exit_code == 2
    return caught.value.problems


def changed(old, new):
    assert old in GOOD
    return GOOD.replace(old, new)


def test_the_good_file_is_good():
    assert parse_space(GOOD, outside=OUTSIDE).name == "toy"


@pytest.mark.parametrize(
    ("old", "new", "line", "where", "says"),
    [
        ("baseline:", "baselin:", 4, "baselin", "did you mean 'baseline'?"),
        ("workload: {concurrency", "workload: {concurency", 3, "workload.concurency", "did you mean 'concurrency'?"),
        ("kind: fake", "kind: fke", 2, "engine.kind", "unknown"),
        ("model: m", "model: gone", 2, "engine.model", "does not exist"),
        ("[1, 8]", "[0, 8]", 3, "workload.concurrency[0]", "above 0"),
        ("[1, 8]", "[1, 1]", 3, "workload", "given twice"),
        ("[1, 8]", "[]", 3, "workload.concurrency", "empty"),
        ("[1, 8]", "[1, eight]", 3, "workload.concurrency[1]", "whole number"),
        ("[1, 8]", "[1, 8], weights: [1]", 3, "workload", "1 weights for 2 levels"),
        ("[1, 8]", "[1, 8], weights: [0, 0]", 3, "workload", "all are 0"),
        ("[1, 8]", "[1, 8], max_tokens: -3", 3, "workload.max_tokens", "above 0"),
        ("[1, 8]", "[1, 8], max_tokens: yes", 3, "workload.max_tokens", "whole number"),
        ("[1, 8]", "[1, 8], temperature: -1", 3, "workload.temperature", "greater than or equal to 0"),
        ("[1, 8]", "[1, 8], prompts: gone", 3, "workload.prompts", "no prompt set"),
        ("choices: [none, ngram]", "choices: []", 6, "parameters.speculation", "choices is empty"),
        ("choices: [none, ngram]", "choices: [none, none]", 6, "parameters.speculation", "given twice"),
        ("choices: [none, ngram]", "choices: [1, true]", 6, "parameters.speculation", "the same to a sampler"),
        ("choices: [none, ngram]", "choices: [none, ngam]", 6, "parameters.speculation.choices[1]", "not valid"),
        ("choices: [none, ngram]", "choices: [none, on]", 6, "parameters.speculation.choices[1]", "'on' is not valid"),
        ("choices: [none, ngram]", "choices: [none, null]", 6, "parameters.speculation.choices[1]", "no value"),
        ("choices: [none, ngram]", "choices: [none, [ngram]]", 6, "parameters.speculation.choices[1]", "must be one"),
        ("choices: [none, ngram]", "choice: [none]", 6, "parameters.speculation.choice", "did you mean 'choices'?"),
        ("choices: [none, ngram]", "distribution: normal", 6, "parameters.speculation.distribution", "unknown"),
        ("low: 1, high: 4", "low: 4, high: 1", 7, "parameters.num_steps", "low 4 is above high 1"),
        ("low: 1, high: 4", "low: 1", 7, "parameters.num_steps", "both low and high"),
        ("low: 1, high: 4", "low: 1, high: 4, choices: [1]", 7, "parameters.num_steps", "not both"),
        ("low: 1, high: 4", "low: 1, high: 4, step: 2", 7, "parameters.num_steps", "3 is"),
        ("low: 1, high: 4", "low: 1, high: 4, step: 0", 7, "parameters.num_steps.step", "above 0"),
        ("low: 1, high: 4", "low: 1, high: 1e3", 7, "parameters.num_steps.high", "not valid"),
        ("low: 1, high: 4", "low: 8, high: 8", 5, "parameters", "takes none of the candidates: num_steps: 8"),
        ("low: 1, high: 4", "low: one, high: 4", 7, "parameters.num_steps.low", "must be a number"),
        ("num_steps: {low", "num_step: {low", 7, "parameters.num_step", "did you mean 'num_steps'?"),
        ("speculation != 'none'", "speculatoin != 'none'", 7, "parameters.num_steps.when", "'speculation'?"),
        ("speculation != 'none'", "speculation != none", 7, "parameters.num_steps.when", "in quotes"),
        ("speculation != 'none'", "speculation == 'eagle3'", 7, "parameters.num_steps.when", "can never hold"),
        ("speculation != 'none'", "tp > 1", 7, "parameters.num_steps.when", "tp is fixed to 1"),
        ("speculation != 'none'", "speculation > 3", 7, "parameters.num_steps.when", "have no order"),
        ("speculation != 'none'", "num_steps > 1", 7, "parameters.num_steps.when", "mentions the parameter itself"),
        ("speculation != 'none'", "speculation ! 'none'", 7, "parameters.num_steps.when", "'not'"),
        ("baseline: {speculation: none}", "baseline: {speculaton: none}", 4, "baseline.speculaton", "did you mean"),
        ("baseline: {speculation: none}", "baseline: {speculation: nope}", 4, "baseline.speculation", "not valid"),
        ("baseline: {speculation: none}", "baseline: {speculation: ngram}", 4, "baseline.speculation", "cannot be"),
        ("baseline: {speculation: none}", "baseline: {tp: 1}", 4, "baseline.tp", "also fixed"),
        ("args: {tp: 1}", "args: {speculation: ngram}", 6, "parameters.speculation", "also fixed"),
        ("name: toy", "name: a/../b", 1, "name", "not usable as a name"),
        ("name: toy", "name: toy\nname: two", 2, "name", "given twice; first on line 1"),
        ("name: toy", "name: toy\nbudget: {launches: 1}", 2, "budget.launches", "only the baseline"),
        ("name: toy", "name: toy\nbudget: {launches: 0}", 2, "budget.launches", "above 0"),
        ("name: toy", "name: toy\nbudget: {hours: 0}", 2, "budget.hours", "above 0"),
        ("name: toy", "name: toy\nobjective: {maximize: quickness}", 2, "objective.maximize", "Valid: speedup,"),
        ("name: toy", "name: toy\nobjective: {maximize: spedup}", 2, "objective.maximize", "did you mean 'speedup'?"),
        ("name: toy", "name: toy\nprofile: shrt", 2, "profile", "did you mean 'short'?"),
        ("name: toy", "name: toy\nrules: [{forbid: num_steps > 1}]", 2, "rules[0].because", "is missing"),
        ("name: toy", "name: toy\nrules: [{forbid: steps > 1, because: x}]", 2, "rules[0].forbid", "'num_steps'"),
        ("name: toy", "name: toy\nrules: [{forbid: speculation == 'ngram', because: x}]", 2, "rules", "no candidate"),
        ("name: toy", "name: toy\n\tx: 1", 2, "", "tabs"),
        ("name: toy", "name: [toy", 2, "", "not YAML"),
    ],
)  # fmt: skip
def test_each_mistake_is_named_where_it_stands(old, new, line, where, says):
    found = problems(changed(old, new))
    assert any(p.line == line and p.where == where and says in p.message for p in found), found


def test_all_problems_are_reported_at_once_in_the_order_of_lines():
    text = GOOD.replace("[1, 8]", "[0]").replace("[none, ngram]", "[]").replace("high: 4", "high: 0")
    assert [problem.line for problem in problems(text)] == [3, 6, 7]


def test_problems_of_meaning_are_reported_together():
    text = GOOD.replace("model: m", "model: gone").replace("ngram]", "ngam]").replace("!= 'none'", "== 'x'")
    assert [problem.line for problem in problems(text)] == [2, 6, 7]


def test_conditions_that_wait_for_one_another_are_named():
    text = GOOD + "  topk: {choices: [1, 2], when: num_steps > 1}\n"
    text = text.replace("speculation != 'none'", "topk > 1")
    assert any("num_steps and topk" in p.message or "topk and num_steps" in p.message for p in problems(text))


def test_a_condition_is_impossible_when_its_parents_are_never_active_together():
    text = GOOD + "  topk: {choices: [1, 2], when: speculation == 'none' and num_steps > 0}\n"
    assert any(p.where == "parameters.topk.when" and "can never hold" in p.message for p in problems(text))


def test_the_words_on_and_off_are_words_and_not_booleans():
    space = parse_space(
        GOOD.replace("[none, ngram]", "[on, off, no, true, 1e3, 1:30, 010, '5']").replace("!= 'none'", "== 'on'")
    )
    assert space.parameters[0].choices == ("on", "off", "no", True, 1000.0, "1:30", 10, "5")


@pytest.mark.parametrize("text", ["", "- 1\n- 2", "just text", "&a [*a]", "[]", "a: &x [*x]"])
def test_a_file_that_is_no_space_is_refused(text):
    assert problems(text)


def test_aliases_that_multiply_are_refused_quickly():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    assert "more than" in problems("\n".join(lines))[0].message


@given(st.text(max_size=200))
def test_no_text_crashes_the_reader(text):
    with contextlib.suppress(UsageError):
        parse_space(text, outside=OUTSIDE)


def test_a_problem_in_an_override_does_not_blame_a_line():
    found = problems(GOOD, "workload.concurrency=[0]")
    assert [(p.line, p.where) for p in found] == [(0, "workload.concurrency[0]")]


@pytest.mark.parametrize("override", ["workload", "=3", "name.x=1", "workload.concurrency.x=3"])
def test_a_malformed_override_is_refused(override):
    with pytest.raises(UsageError):
        parse_space(GOOD, overrides=[override])


def test_a_misshapen_part_does_not_hide_what_is_wrong_elsewhere():
    text = """
name: bad study!
engine: {kind: bundled, model: m, args: {}}
workload: {prompts: mixed, concurrency: [0], max_tokens: -1, temprature: 0}
baseline: {speculation: none}
parameters:
  speculation: {choices: []}
  num_steps: {low: 8, high: 1, when: speculaton != 'none'}
  topk: {choices: [1, 2], when: num_steps > 1}
rules: [{forbid: "f(topk)", because: x}]
budget: {launches: 0}
"""
    with pytest.raises(SpaceProblems) as caught:
        parse_space(text)
    said = str(caught.value)
    for part in (
        "name: 'bad study!'",
        "concurrency[0]",
        "max_tokens",
        "did you mean 'temperature'",
        "choices is empty",
        "low 8 is above high 1",
        "did you mean 'speculation'",
        "rules[0].forbid",
        "budget.launches",
    ):
        assert part in said, part
    assert "topk: " not in said


@pytest.mark.parametrize(
    ("workload", "place"),
    [
        ("{concurrency: [1, 100000000]}", "workload.concurrency[1]"),
        ("{concurrency: [1], max_tokens: 99999999}", "workload.max_tokens"),
        ("{concurrency: [1], temperature: 1.0e300}", "workload.temperature"),
        ("{concurrency: [1, 2], weights: [1, 1.0e308]}", "workload.weights[1]"),
    ],
)
def test_figures_beyond_anything_that_can_work_are_refused(workload, place):
    rest = "baseline: {}\nparameters: {a: {choices: [1]}}\n"
    text = f"name: a\nengine: {{kind: k, model: m}}\nworkload: {workload}\n{rest}"
    with pytest.raises(SpaceProblems) as caught:
        parse_space(text)
    assert f"{place}: must be at most" in str(caught.value)


def test_an_environment_that_cannot_be_is_found_with_its_line():
    text = """name: a
engine: {kind: k, model: m, env: {"A=B": x}}
workload: {concurrency: [1]}
baseline: {}
parameters: {env.X: {choices: ["p\\0q", ok]}}
"""
    outside = Outside(env_problems=env_problems)
    with pytest.raises(SpaceProblems) as caught:
        parse_space(text, outside=outside)
    assert "space:2: engine.env.A=B: 'A=B' is not the name of a variable" in str(caught.value)
    assert "space:5: parameters.env.X.choices[0]" in str(caught.value)


MISFIT = """\
name: toy
engine: {kind: fake, model: m}
workload: {concurrency: [1]}
baseline: {speculation: ngram, disable_batch_threshold: never}
parameters:
  speculation: {choices: [ngram]}
  disable_batch_threshold: {choices: [8, 16, 32]}
rules:
  - {forbid: disable_batch_threshold > 16, because: too high}
"""


def test_a_rule_that_cannot_be_asked_of_the_baseline_is_a_problem_of_the_rule_with_what_to_write():
    with pytest.raises(SpaceProblems) as caught:
        parse_space(MISFIT)
    (problem,) = caught.value.problems
    assert (problem.line, problem.where) == (9, "rules[0].forbid")
    assert (
        "does not fit the baseline (disable_batch_threshold='never'): 'never' and 16 have no order" in problem.message
    )
    written = "disable_batch_threshold != 'never' and (disable_batch_threshold > 16)"
    assert f"write {written}" in problem.message
    good = parse_space(MISFIT.replace("disable_batch_threshold > 16", written))
    assert [good.forbidden(Candidate({"disable_batch_threshold": each})) is None for each in (8, 32, "never")] == [
        True,
        False,
        True,
    ]


def test_without_speculation_a_rule_about_it_is_not_asked_of_the_baseline():
    text = MISFIT.replace("speculation: ngram, d", "speculation: none, d")
    assert parse_space(text).baseline.settings == {"speculation": "none"}


def test_a_candidate_of_which_a_rule_cannot_be_asked_is_ruled_out_with_the_reason():
    space = parse_space(MISFIT.replace("threshold: never", "threshold: 8"))
    why = space.forbidden(Candidate({"disable_batch_threshold": "never"}))
    assert why == (
        "a rule does not fit disable_batch_threshold='never': 'never' and 16 have no order "
        "(rule: disable_batch_threshold > 16)"
    )


def test_a_condition_that_fits_all_but_one_value_in_a_million_ends_in_words():
    text = MISFIT.partition("parameters")[0] + (
        "parameters:\n  mem: {low: 0.25, high: 0.9}\n  depth: {choices: [1, 2], when: 1 / (mem - 0.5) > 1}\n"
    )
    space = parse_space(text)
    with pytest.raises(UsageError, match=r"'1 / \(mem - 0\.5\) > 1' does not fit mem=0\.5: .* divides by zero"):
        space.suggest(FixedTrial({"mem": 0.5, "depth": 1}))


def test_a_condition_that_does_not_fit_is_told_once_whatever_hangs_on_it():
    class Connected(FakeEngine):
        settings = {**FakeEngine.settings, "allreduce": KnownSetting("nccl")}  # noqa: RUF012

    text = GOOD.replace("num_steps: {low: 1, high: 4", "env.NCCL_PROTO: {choices: [unset, LL]").replace(
        "speculation != 'none'", "speculation > 3"
    )
    with pytest.raises(SpaceProblems) as caught:
        parse_space(text, outside=Outside(lambda _kind: Connected()))
    (problem,) = caught.value.problems
    assert (problem.line, problem.where) == (7, "parameters.env.NCCL_PROTO.when")
    assert "have no order" in problem.message


ARGS = """\
name: fixed
engine: {{kind: {kind}, model: {model}, args: {{{args}}}}}
workload: {{concurrency: [1]}}
baseline: {{speculation: {plain}}}
parameters:
  {parameters}
"""
OF_SPECULATION = "speculation: {choices: [none, ngram]}"


@pytest.mark.parametrize(("kind", "model"), [("bundled", "smollm2-135m"), ("llama_server", "a/b")])
@pytest.mark.parametrize(
    ("args", "plain", "parameters", "says"),
    [
        ("num_steps: 4", "none", OF_SPECULATION, None),
        ("num_steps: 4", "ngram", "speculation: {choices: [ngram, none]}", None),
        ("num_steps: 99", "none", OF_SPECULATION, "engine.args.num_steps: num_steps: 99 is not valid"),
        ("num_steps: 4", "none", "max_running_requests: {choices: [4, 8]}", "num_steps: has no meaning while"),
    ],
)
def test_what_is_fixed_of_speculation_is_no_problem_of_plain_decoding(kind, model, args, plain, parameters, says):
    text = ARGS.format(kind=kind, model=model, args=args, plain=plain, parameters=parameters)
    outside = Outside(engine_for=get_engine)
    if says is None:
        parse_space(text, source="fixed.yaml", outside=outside)
        return
    with pytest.raises(SpaceProblems, match=says):
        parse_space(text, source="fixed.yaml", outside=outside)


def test_what_is_wrong_for_all_that_speculate_is_said_where_it_stands():
    text = ARGS.format(
        kind="bundled", model="smollm2-135m", args="num_steps: 3, steps_by_batch: often", plain="none",
        parameters=OF_SPECULATION,
    )  # fmt: skip
    with pytest.raises(SpaceProblems, match=r"engine.args.steps_by_batch: .* is not of the form"):
        parse_space(text, source="fixed.yaml", outside=Outside(engine_for=get_engine))


def test_rules_do_not_see_what_is_fixed_of_speculation_where_there_is_none():
    choices = "speculation: {choices: [none, ngram, eagle3]}"
    text = ARGS.format(kind="bundled", model="smollm2-135m", args="num_steps: 4", plain="none", parameters=choices)
    rule = "num_steps > 3 and speculation != 'eagle3'"
    space = parse_space(f'{text}rules: [{{forbid: "{rule}", because: too deep}}]\n', source="fixed.yaml")
    assert space.forbidden(Candidate({"speculation": "none"})) is None
    assert space.forbidden(Candidate({})) is None, "what says nothing of speculation has none"
    assert space.forbidden(Candidate({"speculation": "ngram"})) == f"too deep (rule: {rule})"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("num_steps: three", "'three' is not valid; valid: a whole number from 0 on"),
        ("num_steps: -4", "-4 is not valid"),
        ("topk: 0", "0 is not valid; valid: a whole number from 1 on"),
        ("steps_by_batch: often", "is not of the form 1:0,8:3,64:0"),
    ],
)
def test_a_simulated_machine_takes_only_what_its_physics_can_count(args, says):
    text = ARGS.format(kind="simulated", model="any", args=args, plain="none", parameters=OF_SPECULATION)
    with pytest.raises(SpaceProblems, match=says):
        parse_space(text, source="fixed.yaml", outside=Outside(engine_for=get_engine))


def test_a_rule_may_name_what_a_study_tries_by_itself():
    rule = "rules: [{forbid: \"steps_by_batch != ''\", because: one depth for all}]"
    space = parse_space(GOOD, source="toy.yaml", overrides=[rule.replace("rules: ", "rules=")], outside=OUTSIDE)
    assert space.forbidden(Candidate({"speculation": "ngram", "num_steps": 2, "steps_by_batch": "1:2,4:0"}))
    assert not space.forbidden(Candidate({"speculation": "ngram", "num_steps": 2}))
