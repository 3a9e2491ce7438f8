"""A new study takes from an earlier one what still applies, and says what does not and why."""

from __future__ import annotations

import pytest

from tests.tuner.cli.test_cli_commands import KnownEngine, machine, tuner  # noqa: F401
from tests.tuner.study.toy_study import SPACE, space, speed, study
from tuner.study.ahead import SCOPE
from tuner.study.inherit import changes_since
from tuner.study.store import create_study, open_study
from tuner.study.summary import scope
from tuner.study.trials import Trials

WIDER = SPACE.replace("launches: 14", "launches: 8").replace("high: 4", "high: 6").replace("name: toy", "name: wider")


@pytest.fixture
def old(machine, tmp_path):  # noqa: F811
    machine.speed = lambda settings, level: speed(
        {**settings, "num_steps": min(settings.get("num_steps", 1), 4)}, level
    )
    result = tuner("run", "toy.yaml", "--launches", 9)
    assert result.exit_code == 0, result.output
    machine.starts.clear()
    return data("toy")


def data(name):
    store = open_study(name)
    try:
        return store.data()
    finally:
        store.close()


def write(tmp_path, text):
    (tmp_path / "new.yaml").write_text(text)
    return "new.yaml"


def test_a_wider_range_takes_what_was_measured_and_measures_none_of_it_again(old, machine, tmp_path):  # noqa: F811
    measured = {trial.candidate_id for trial in old.measured}
    result = tuner("run", write(tmp_path, WIDER), "--import", "toy")
    assert result.exit_code == 0, result.output
    assert f"study 'toy': {len(measured)} candidates taken as measured there" in result.output
    new = data("wider")
    imported = [trial for trial in new.trials if trial.kind == "imported"]
    assert {trial.candidate_id for trial in imported} == measured
    for trial in imported:
        then = next(t for t in old.measured if t.candidate_id == trial.candidate_id)
        assert trial.value == pytest.approx(then.value), "compared with the baseline of its own study"
    screened = [launch for launch in new.launches if launch.slot.role == "screen" and launch.state == "done"]
    assert not {launch.slot.candidate_id for launch in screened} & measured
    assert len(machine.starts) <= 8, "imported launches take nothing of the budget"
    at = {launch.id: launch.place for launch in new.launches}
    for pair in new.pairs:
        sides = [new.blocks[pair.baseline_block], new.blocks[pair.candidate_block]]
        assert len({at[side.launch_id] for side in sides}) == 1, "no pair of an old and a new block"
    assert {new.blocks[p.candidate_block].launch_id for p in new.pairs if p.role == "confirm"} <= {
        launch.id for launch in new.launches if launch.state == "done"
    }, "a winner is confirmed by new blocks alone"


def test_a_new_study_is_told_of_an_earlier_one_that_has_measured_of_it(old, machine, tmp_path):  # noqa: F811
    measured = {trial.candidate_id for trial in old.measured}
    offer = f"study 'toy' has measured {len(measured)} candidates of this space as they would be measured here"
    result = tuner("run", write(tmp_path, WIDER), "--launches", 2)
    assert f"{offer}: --import toy takes them" in result.output
    assert offer not in tuner("run", "new.yaml", "--launches", 3).output, "only of a new one"
    changed = WIDER.replace("name: wider", "name: changed").replace("max_tokens: 64", "max_tokens: 50")
    result = tuner("run", write(tmp_path, changed), "--launches", 2)
    assert result.exit_code == 0, result.output
    assert offer not in result.output, "measured otherwise"
    taken = WIDER.replace("name: wider", "name: taken")
    assert offer not in tuner("run", write(tmp_path, taken), "--launches", 2, "--import", "toy").output


def test_what_there_is_to_try_is_known_of_a_study_that_began_with_an_import(old, machine, tmp_path):  # noqa: F811
    tuner("run", write(tmp_path, WIDER), "--import", "toy", "--launches", 4)
    new = data("wider")
    assert scope(new).candidates == len(new.space.listed()) - 1
    tuner("run", "new.yaml", "--launches", 6)
    assert [event.kind for event in data("wider").events].count(SCOPE) == 1


def test_an_import_is_repeated_without_effect(old, machine, tmp_path):  # noqa: F811
    tuner("run", write(tmp_path, WIDER), "--import", "toy", "--launches", 4)
    before = data("wider")
    result = tuner("run", "new.yaml", "--import", "toy", "--launches", 4)
    assert result.exit_code == 0, result.output
    after = data("wider")
    assert len(after.trials) == len(before.trials)
    assert after.blocks.keys() == before.blocks.keys()


def test_what_the_new_space_does_not_offer_is_left_out_with_the_reason(old, machine, tmp_path):  # noqa: F811
    narrow = SPACE.replace("high: 4", "high: 2").replace("name: toy", "name: narrow").replace("s: 14", "s: 4")
    result = tuner("run", write(tmp_path, narrow), "--import", "toy")
    assert result.exit_code == 0, result.output
    assert "left out: the space does not offer num_steps=" in result.output
    new = data("narrow")
    kept = {trial.candidate_id for trial in new.trials if trial.kind == "imported"}
    assert all(new.settings_of(c).get("num_steps", 0) <= 2 for c in kept)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text.replace("model: toy", "model: other"), "model: was 'toy', is now 'other'"),
        (lambda text: text.replace("max_tokens: 64", "max_tokens: 32"), "max_tokens: was 64, is now 32"),
    ],
)
def test_what_was_measured_under_other_conditions_is_stale_and_only_tried_first(
    old,
    machine,  # noqa: F811
    tmp_path,
    change,
    says,
):
    result = tuner("run", write(tmp_path, change(WIDER)), "--import", "toy")
    assert result.exit_code == 0, result.output
    assert "stale and not mixed in" in result.output
    assert says in result.output
    new = data("wider")
    assert not [trial for trial in new.trials if trial.kind == "imported"]
    assert {one.state for one in new.imports} <= {"stale", "failed", "outside"}
    best = max(old.measured, key=lambda trial: trial.value)
    assert new.measured[0].candidate_id == best.candidate_id, "the best of then is tried first"


def test_another_version_of_the_engine_makes_results_stale(old, machine, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(KnownEngine, "version", lambda self: "2")
    result = tuner("run", write(tmp_path, WIDER), "--import", "toy")
    assert "engine version: was '1', is now '2'" in result.output
    assert not [trial for trial in data("wider").trials if trial.kind == "imported"]


def test_another_space_altogether_gives_nothing_and_the_study_goes_on(old, machine, tmp_path):  # noqa: F811
    other = WIDER.replace("num_steps: {low: 1, high: 6, when: speculation != 'none'}", "depth: {choices: [7, 8]}")
    other = other.replace("num_steps == 4 and ", "depth == 8 and ")
    monkey = machine.speed
    machine.speed = lambda settings, level: monkey({"speculation": "none"}, level)
    result = tuner("run", write(tmp_path, other), "--import", "toy")
    assert result.exit_code == 0, result.output
    assert "0 candidates taken" in result.output
    assert "left out" in result.output
    assert "the space asks for depth" in result.output


def test_a_study_that_is_not_there_or_has_begun_otherwise_is_refused(old, machine, tmp_path):  # noqa: F811
    result = tuner("run", write(tmp_path, WIDER), "--import", "toi")
    assert result.exit_code == 2
    assert "Did you mean 'toy'?" in result.output
    assert not (tmp_path / "studies/wider").exists(), "nothing half-written"
    tuner("run", "new.yaml", "--launches", 4)
    result = tuner("run", "new.yaml", "--import", "toy")
    assert result.exit_code == 2
    assert "--study wider-2 --import" in result.output


def test_the_same_imports_go_on_even_where_one_of_them_had_nothing(old, machine, tmp_path):  # noqa: F811
    for name in ("bare", "other"):
        create_study(name, space=space(), space_text="", fingerprint={}, seed=0, budget=old.budget).close()
    both = ("--import", "toy", "--import", "bare")
    assert tuner("run", write(tmp_path, WIDER), *both, "--launches", 4).exit_code == 0
    assert {one.source for one in data("wider").imports} == {"toy"}
    trials = data("wider").trials
    for sources in (both, ("--import", "bare"), ("--import", "toy")):
        again = tuner("run", "new.yaml", *sources, "--launches", 4)
        assert again.exit_code == 0, again.output
    assert data("wider").trials == trials
    refused = tuner("run", "new.yaml", *both, "--import", "other")
    assert refused.exit_code == 2
    assert "was begun without other" in refused.output


def test_an_import_that_was_cut_short_is_finished_by_the_same_command(old, machine, tmp_path, monkeypatch):  # noqa: F811
    class Cut(Exception):
        pass

    def cut(*_args, **_facts):
        raise Cut

    with monkeypatch.context() as patched:
        patched.setattr(Trials, "record", cut)
        with pytest.raises(Cut):
            tuner("run", write(tmp_path, WIDER), "--import", "toy")
    assert data("wider").launches, "those of the earlier study"
    result = tuner("run", "new.yaml", "--import", "toy", "--launches", 4)
    assert result.exit_code == 0, result.output
    new = data("wider")
    imported = {trial.candidate_id for trial in new.trials if trial.kind == "imported"}
    assert imported == {trial.candidate_id for trial in old.measured}
    assert new.budget.launches == 4


RANGED = SPACE.partition("parameters:")[0].replace("{speculation: none}", "{mem: 0.7}") + (
    "parameters:\n  mem: MEM\nbudget: {launches: 5, candidates: 40}\nprofile: short\n"
)


def test_a_number_that_an_earlier_version_kept_in_binary_is_the_decimal_that_it_is(machine, tmp_path):  # noqa: F811
    tuner("run", write(tmp_path, RANGED.replace("MEM", "{choices: [0.7, 0.7999999999999999, 0.9]}")))
    assert {settings["mem"] for settings in machine.starts} == {0.7, 0.7999999999999999, 0.9}
    wider = RANGED.replace("MEM", "{low: 0.6, high: 0.9, step: 0.1}").replace("name: toy", "name: wider")
    result = tuner("run", write(tmp_path, wider), "--import", "toy")
    assert result.exit_code == 0, result.output
    assert "2 candidates taken as measured there" in result.output
    new = data("wider")
    imported = [new.settings_of(trial.candidate_id) for trial in new.trials if trial.kind == "imported"]
    assert sorted(settings["mem"] for settings in imported) == [0.8, 0.9]


@pytest.mark.parametrize(
    ("key", "value", "was", "is_now"),
    [
        ("shm_size", "16g", None, "16g"),
        ("gpus", "[0]", None, [0]),
        ("network", "bridge", "host", "bridge"),
        ("run_args", "[--cpus=4]", [], ["--cpus=4"]),
    ],
)
def test_how_a_container_is_run_is_among_what_figures_depend_on(tmp_path, key, value, was, is_now):
    text = SPACE.replace("model: toy}", "model: toy, container: {image: an/image}}")
    store = study(tmp_path, space(text))
    old = store.data()
    store.close()
    now = space(text, f"engine.container.{key}={value}")
    assert changes_since(old, now, {}) == [f"container, {key}: was {was!r}, is now {is_now!r}"]
    named = space(text, "engine.container.image=an/image:again")
    assert changes_since(old, named, {}) == [], "an image is told by its digest"
