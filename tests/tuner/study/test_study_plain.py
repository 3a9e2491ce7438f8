"""Plain decoding is in the race, also where the baseline speculates and where the space does not list it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.tuner.study.hot_toy import HotEngine
from tests.tuner.study.test_study_controller import run
from tests.tuner.study.toy_study import SPACE, ToyEngine, ToyMachine, controller, space, study
from tuner.engines import bundled, neutral
from tuner.engines.base import get_engine
from tuner.records import Failure
from tuner.search.crashes import Crash
from tuner.space import Space
from tuner.space.space import SPECULATIVE
from tuner.study.crashes import CrashMemory, Elsewhere
from tuner.study.data import Budget, StoredEvent
from tuner.study.decide import recommendation
from tuner.study.engine import illegal, launch_record
from tuner.study.plain import NO_PLAIN, out_of_race, plain_candidate, plain_due
from tuner.study.plan import Timing, plan
from tuner.study.planner import BUDGET
from tuner.study.policy import Policy
from tuner.study.recompute import recompute
from tuner.study.sampler import Proposer

SPECULATING = (
    "baseline={speculation: ngram, num_steps: 4, disable_batch_threshold: never}",
    "budget.launches=40",
)
LISTED = ("parameters.speculation.choices=[none, ngram]", *SPECULATING)
UNLISTED = ("parameters.speculation.choices=[ngram]", *SPECULATING)


def slow_drafts(settings, level):  # type: ignore[no-untyped-def]
    """The fewer steps the better, and none is best."""
    return 100.0 * level * (1 - 0.1 * settings.get("num_steps", 0))


@pytest.mark.parametrize("overrides", [LISTED, UNLISTED, (*UNLISTED, "parameters.num_steps={choices: [3]}")])
@pytest.mark.parametrize("sampler", ["model", "random", "tpe"])
def test_plain_decoding_is_measured_once_beside_a_baseline_that_speculates(tmp_path, overrides, sampler) -> None:
    data, *_ = run(tmp_path, ToyMachine(speed=slow_drafts), the_space=space(SPACE, *overrides, f"sampler={sampler}"))
    plain = [t for t in data.measured if data.settings_of(t.candidate_id).get("speculation") == "none"]
    assert len(plain) == 1
    found = recommendation(data).overall
    assert found.winner is not None
    assert found.winner.settings["speculation"] == "none"


def test_a_command_line_is_given_no_value_that_its_space_does_not_list() -> None:
    command = "engine={kind: command, model: toy, args: {command: [serve, '{speculation}']}}"
    assert plain_candidate(space(SPACE, *UNLISTED, command)) is None
    assert plain_candidate(space(SPACE, *LISTED, command)) is not None
    assert plain_candidate(space(SPACE)) is None, "the baseline is plain"


def test_a_plain_candidate_that_the_engine_refuses_is_not_begun(tmp_path) -> None:
    engine = ToyEngine(problems=lambda s: ["it must speculate"] if s.get("speculation") == "none" else [])
    data, *_ = run(tmp_path, ToyMachine(), the_space=space(SPACE, *UNLISTED), engine=engine)
    assert data.state == "done"
    assert all(data.settings_of(trial.candidate_id)["speculation"] == "ngram" for trial in data.trials)
    [said] = [event.message for event in data.events if event.kind == NO_PLAIN]
    assert "it must speculate" in said
    notes = plan(space(SPACE, *UNLISTED), engine, Timing(1.0, 1.0, "")).notes
    assert any("plain decoding is not in the race: it must speculate" in note for note in notes)


def test_the_plan_tells_of_it() -> None:
    def notes(the_space: Space) -> str:
        return "; ".join(plan(the_space, HotEngine(), Timing(1.0, 1.0, "")).notes)

    assert "plain decoding is tried once" in notes(space(SPACE, *UNLISTED))
    assert "plain decoding" not in notes(space(SPACE))


MORE = SPACE.replace(
    "rules:",
    """\
  draft_words: {choices: [a, b], when: speculation != 'none'}
  threads: {choices: [2, 1]}
  env.FOO: {choices: [unset, '1']}
rules:""",
)


@pytest.mark.parametrize("choices", ["[none, ngram]", "[ngram]"])
def test_plain_decoding_differs_from_the_baseline_in_speculation_alone(choices) -> None:
    def settings(baseline: str) -> dict[str, object]:
        found = plain_candidate(space(MORE, f"parameters.speculation.choices={choices}", f"baseline={baseline}"))
        assert found is not None
        return {name: value for name, value in found.settings.items() if (name, value) != ("env.FOO", "unset")}

    drafts = "speculation: ngram, num_steps: 4, draft_words: b, draft_attention_backend: x"
    assert settings(f"{{{drafts}, threads: 1}}") == {"speculation": "none", "threads": 1}
    assert settings(f"{{{drafts}}}") == {"speculation": "none"}, "what the baseline leaves to the engine stays there"
    assert settings(f"{{{drafts}, env.FOO: '1'}}") == {"speculation": "none", "env.FOO": "1"}


def test_a_listed_candidate_is_taken_where_it_is_the_same() -> None:
    the_space = space(MORE, "baseline={speculation: ngram, num_steps: 4, threads: 1}")
    found = plain_candidate(the_space)
    assert found is not None
    assert found.id in the_space.listed()


FIXED = """
name: fixed
engine: {kind: bundled, model: smollm2-135m, args: {speculation: ngram, num_steps: 4}}
workload: {concurrency: [1], max_tokens: 64}
baseline: {threads: 1}
parameters:
  threads: {choices: [1, 2]}
budget: {launches: 14, candidates: 40}
profile: short
"""


def test_plain_decoding_is_launched_without_what_is_fixed_of_speculation() -> None:
    the_space, engine = space(FIXED), get_engine("bundled")
    plain = plain_candidate(the_space)
    assert plain is not None
    assert illegal(the_space, engine, plain) is None
    assert out_of_race(the_space, engine) == ""
    argv = launch_record(the_space, engine, plain, host="127.0.0.1", port=1).argv
    assert argv[argv.index("--speculation") + 1] == "none"
    assert "--num-steps" not in argv
    assert "--num-steps" in launch_record(the_space, engine, the_space.baseline, host="127.0.0.1", port=1).argv


def test_a_server_for_plain_decoding_keeps_what_it_cannot_be_given_later() -> None:
    """A running server is not given a head: it is launched with it, and can be changed to speculate."""
    engine = get_engine("bundled")
    fixed = "engine.args={speculation: eagle3, num_steps: 3, draft_head: mine.safetensors}"
    changed = space(FIXED, fixed, "parameters={spec_version: {choices: [v1, v2]}}", "baseline={spec_version: v2}")
    for the_space, has_head in ((changed, True), (space(FIXED, fixed), False)):
        plain = plain_candidate(the_space)
        assert plain is not None
        assert out_of_race(the_space, engine) == ""
        argv = launch_record(the_space, engine, plain, host="127.0.0.1", port=1).argv
        assert argv[argv.index("--speculation") + 1] == "none"
        assert ("--draft-head" in argv) == has_head
        assert "--num-steps" not in argv


def test_what_keeps_plain_decoding_out_is_said() -> None:
    rule = "rules=[{forbid: speculation == 'none', because: it is too slow}]"
    why = out_of_race(space(FIXED, rule), get_engine("bundled"))
    assert why.startswith("plain decoding is not in the race: it is too slow (rule:")


def test_what_was_never_measured_was_not_tried(tmp_path) -> None:
    data, *_ = run(tmp_path, ToyMachine(), the_space=space(SPACE, *UNLISTED, "sampler=random"))
    plain = plain_candidate(data.space)
    assert plain is not None
    mine = next(trial for trial in data.measured if trial.candidate_id == plain.id)

    def due(kind, *events):  # type: ignore[no-untyped-def]
        trials = (*data.trials[:2], replace(mine, number=2, kind=kind))
        return plain_due(replace(data, trials=trials, events=events), lambda one: one.id)

    assert due("measured") is None
    assert due("illegal") == due("known_crash") == plain
    assert due("out_of_launches") is None, "there is no launch for it within this budget"
    assert due("out_of_launches", StoredEvent(1, 0.0, BUDGET, "50 launches", {"from_trial": 3})) == plain


def test_plain_decoding_that_had_no_launch_is_tried_with_a_larger_budget(tmp_path) -> None:
    def busy(_phase, settings, _count):  # type: ignore[no-untyped-def]
        plain = settings["speculation"] == "none"
        return Failure("transient_env", "start", "busy", blame="environment", retryable=True) if plain else None

    the_space = space(SPACE, *UNLISTED, "budget.launches=5", "sampler=random")
    policy, machine = Policy(pairs=1), ToyMachine(speed=slow_drafts, fails=busy)
    data, _, store = run(tmp_path, machine, the_space=the_space, policy=policy)
    assert _kinds_of_plain(data) == ["out_of_launches"]
    machine.fails = lambda *_: None
    store.set_budget(Budget(20, 40, None), "20 launches")
    data = controller(store, machine, policy=policy).run()
    assert _kinds_of_plain(data) == ["out_of_launches", "measured"]
    assert recompute(data, data.pairs).differences == ()


def _kinds_of_plain(data) -> list[str]:  # type: ignore[no-untyped-def]
    return [trial.kind for trial in data.trials if data.settings_of(trial.candidate_id)["speculation"] == "none"]


def test_the_model_does_not_end_the_search_before_plain_decoding_is_tried(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Proposer, "fruitless", lambda *_: "more cannot pay")
    machine = ToyMachine(speed=slow_drafts)
    data, *_ = run(tmp_path, machine, the_space=space(SPACE, *UNLISTED), policy=Policy(pairs=1, fewest=1))
    assert _kinds_of_plain(data) == ["measured"]
    assert data.reason == "more cannot pay"


def test_crashes_of_other_plain_candidates_do_not_keep_it_out(tmp_path) -> None:
    class Memory(CrashMemory):
        def elsewhere(self, data):  # type: ignore[no-untyped-def]
            crashed = tuple(Crash({"speculation": "none", "threads": threads}) for threads in (2, 3))
            return Elsewhere(crashed, crashed)

    store = study(tmp_path, space(SPACE, *UNLISTED, "sampler=random"))
    machine = ToyMachine(speed=slow_drafts)
    data = controller(store, machine, policy=Policy(pairs=1), crashes=Memory(tmp_path / "crashes.jsonl")).run()
    assert _kinds_of_plain(data) == ["measured"]


def test_it_is_tried_before_values_that_have_to_be_proven(tmp_path) -> None:
    """There may be so many of those that the search ends with them, for none brings a gain."""
    baseline = "baseline={speculation: ngram, num_steps: 4, disable_batch_threshold: never, allreduce: nccl}"
    the_space = space(SPACE, *UNLISTED, baseline, "parameters.allreduce={choices: [nccl, custom, nvls, mscclpp]}")
    machine = ToyMachine(speed=lambda *_: 100.0)
    data, *_ = run(tmp_path, machine, the_space=the_space, policy=Policy(pairs=0, no_gain=2, fewest=99))
    assert "brought no gain" in data.reason
    assert _kinds_of_plain(data) == ["measured"]


def test_every_setting_that_an_engine_refuses_without_speculation_is_left_out() -> None:
    of_engines = {*neutral.SPECULATIVE, *bundled._SPECULATION}
    assert of_engines - {"speculation"} <= SPECULATIVE
