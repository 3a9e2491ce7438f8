import pytest

from tests.tuner.study.toy_study import SPACE, ToyMachine, controller, space, study
from tuner.errors import UsageError
from tuner.space.space import Parameter
from tuner.study.data import Budget
from tuner.study.hardware import hardware
from tuner.study.policy import Policy
from tuner.study.session import Limits, fingerprint, open_or_create

MACHINE = {"cpu": "x", "cores": 2, "memory_gib": 4, "gpus": []}


@pytest.fixture
def opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def open_it(*overrides, limits=None, version="1", machine=MACHINE, name=None):
        the_space = space(SPACE, *overrides)
        now = fingerprint(the_space, version, machine)
        return open_or_create(the_space, name=name, storage=None, limits=limits or Limits(), now=now)

    return open_it


def test_a_study_is_made_once_and_then_continued(opened, tmp_path):
    first = opened().data()
    assert opened().data().uid == first.uid
    assert (tmp_path / "studies" / "toy" / "study.db").is_file()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"overrides": ["parameters.num_steps.high=3"]}, "parameters.num_steps.high: was 4, is now 3"),
        ({"overrides": ["workload.concurrency=[1, 4]"]}, r"workload.concurrency: was \[1, 8\], is now \[1, 4\]"),
        ({"overrides": ["profile=full"]}, "profile: was 'short', is now 'full'"),
        ({"overrides": ["engine.model=other"]}, "engine.model: was 'toy', is now 'other'"),
        ({"version": "2"}, "engine version: was 1, is now 2"),
        ({"machine": {**MACHINE, "cores": 8}}, "hardware, cores: was 2, is now 8"),
    ],
)
def test_a_changed_study_is_refused_with_what_changed_and_a_new_name(opened, change, says):
    opened().close()
    overrides = change.pop("overrides", [])
    with pytest.raises(UsageError, match=says) as refused:
        opened(*overrides, **change)
    assert "--study toy-2" in str(refused.value)
    assert refused.value.exit_code == 2
    assert opened(*overrides, name="toy-2", **change).data().state == "new"


def test_a_budget_may_change_and_is_a_total(opened):
    assert opened().data().budget == Budget(14, 40, None)
    assert opened(limits=Limits(launches=20)).data().budget == Budget(20, 40, None)
    assert opened().data().budget == Budget(20, 40, None), "running it again does not take it back"
    assert opened("budget.launches=16").data().budget == Budget(16, 40, None), "editing the file does"
    assert opened("budget.launches=16", limits=Limits(hours=2, candidates=5)).data().budget == Budget(16, 5, 2)


def test_more_on_a_finished_study_means_so_many_candidates_and_a_confirmation(opened):
    store = opened("budget.launches=6", "budget.candidates=2")
    policy = Policy(pairs=1)
    before = controller(store, ToyMachine(), policy=policy).run()
    assert len(before.measured) == 2
    store = opened("budget.launches=6", "budget.candidates=2", limits=Limits(more=3))
    after = controller(store, ToyMachine(), policy=policy).run()
    assert len(after.measured) == 5
    assert after.state == "done"
    best = max((t for t in after.measured if t.feasible), key=lambda t: t.value)
    assert best.candidate_id in {c for confirmation in after.confirmations for c in confirmation.finalists}
    assert before.blocks.items() <= after.blocks.items()


@pytest.mark.parametrize("sampler", ["tpe", "random"])
@pytest.mark.parametrize("ends", [{"no_gain": 2}, {"max_idle_trials": 1}])
def test_more_goes_on_whatever_has_ended_the_search(opened, sampler, ends):
    flat = ToyMachine(speed=lambda _settings, level: 100.0 * level)
    the_space, policy = ("budget.launches=40", f"sampler={sampler}"), Policy(pairs=1, fewest=99, **ends)
    before = controller(opened(*the_space), flat, policy=policy).run()
    assert before.reason.startswith("the last ")
    after = controller(opened(*the_space, limits=Limits(more=2)), flat, policy=policy).run()
    assert len(after.trials) > len(before.trials)
    if "no_gain" in ends:
        assert len(after.measured) == len(before.measured) + 2


RANGED = SPACE.partition("parameters:")[0].replace("{speculation: none}", "{mem: 0.7}") + (
    "parameters:\n  mem: MEM\nbudget: {launches: 20, candidates: 40}\nprofile: short\n"
)


def test_a_study_whose_numbers_an_earlier_version_kept_in_binary_measures_none_of_them_again(tmp_path, monkeypatch):
    policy = Policy(pairs=1)
    with monkeypatch.context() as earlier:
        binary = {0.8: 0.7999999999999999}
        earlier.setattr(Parameter, "_number", lambda self, exact: binary.get(float(exact), float(exact)))
        store = study(tmp_path, space(RANGED.replace("MEM", "{low: 0.7, high: 0.9, step: 0.1}")))
        before = controller(store, ToyMachine(), policy=policy).run()
    assert {"mem": 0.7999999999999999} in [before.settings_of(trial.candidate_id) for trial in before.measured]
    assert len(before.measured) == 2
    store.set_space(space(RANGED.replace("MEM", "{low: 0.6, high: 0.9, step: 0.1}")), "")
    data = controller(store, ToyMachine(), policy=policy).run()
    tried = [data.settings_of(trial.candidate_id) for trial in data.trials[len(before.trials) :]]
    assert tried == [{"mem": 0.6}]


@pytest.mark.parametrize("limits", [{"launches": 0}, {"launches": 1}, {"more": -1}, {"hours": 0.0}, {"candidates": 0}])
def test_limits_that_make_no_sense_are_refused(limits):
    with pytest.raises(UsageError):
        Limits(**limits)


def test_the_hardware_is_the_same_twice():
    assert hardware() == hardware()
    assert hardware()["cores"] >= 1
