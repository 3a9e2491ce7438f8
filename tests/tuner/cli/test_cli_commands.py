"""The commands as a user meets them, on a machine whose speed is a function of the candidate."""

import json
import re

import pytest
from typer.testing import CliRunner

from tests.tuner.study.toy_study import SPACE, ToyEngine, ToyMachine
from tuner.cli.app import app
from tuner.records import Failure
from tuner.study.lease import acquire
from tuner.study.place import Place, hostname
from tuner.study.policy import POLICIES, Policy
from tuner.study.store import open_study


class KnownEngine(ToyEngine):
    settings = {}  # noqa: RUF012

    def version(self):
        return "1"

    def check_model(self, model):
        return None


class AnySetting(dict):
    def __contains__(self, name):
        return True

    def __missing__(self, name):
        class Fine:
            def problem(self, value):
                return None

        return Fine()


KnownEngine.settings = AnySetting()


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """The toy in place of the machine and the engine; studies go to a fresh folder, with one pair per confirmation."""
    the_machine = ToyMachine()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tuner.engines.base.get_engine", lambda kind: KnownEngine())
    monkeypatch.setattr("tuner.study.session.Machine", lambda space, **_: the_machine)
    monkeypatch.setitem(POLICIES, "short", Policy(pairs=1))
    (tmp_path / "toy.yaml").write_text(SPACE.replace("launches: 14", "launches: 5"))
    return the_machine


def tuner(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def test_run_ends_with_the_recommendation_and_what_to_do_next(machine):
    result = tuner("run", "toy.yaml")
    assert result.exit_code == 0
    assert "Recommendation of study toy (short profile)" in result.stdout
    assert "tuner report toy" in result.stdout
    assert "tuner export toy --format shell --output DIR" in result.stdout
    assert re.search(r"^\[ *\d+:\d\d\] launch 1 of 5: the baseline \(screen\)$", result.stdout, re.MULTILINE)
    left = r"^\[ *\d+:\d\d\] launch 4 of 5: .*; about \d+ (s|min) left, ends about (\w+ )?\d\d:\d\d$"
    assert re.search(left, result.stdout, re.MULTILINE), "from the first launch on"
    (why,) = re.findall(r"confirming .* in 1 pairs? with the baseline: (.*)", result.stdout)
    assert "picks the lucky" in why
    assert re.search(r"It took .* with a server in all\.$", result.stdout, re.MULTILINE)


def test_a_plan_says_what_has_become_of_the_study_of_its_name(machine):
    plan = tuner("plan", "toy.yaml").stdout
    assert re.search(r"^time: about .*; begun now, it ends about (\w+ )?\d\d:\d\d", plan, re.MULTILINE)
    assert "study toy" not in plan
    tuner("run", "toy.yaml")
    done = tuner("plan", "toy.yaml").stdout
    assert "note: study toy is done (5 of 5 launches; " in done
    assert "tuner run toy.yaml measures nothing more" in done
    store = open_study("toy")
    store.set_state("stopped")
    store.close()
    assert "note: study toy has begun (5 of 5 launches" in tuner("plan", "toy.yaml").stdout


def test_space_is_the_same_as_the_file(machine):
    assert tuner("run", "--space", "toy.yaml").exit_code == 0
    assert len(machine.starts) == 5


def test_running_it_again_starts_nothing_and_says_the_same(machine):
    first = tuner("run", "toy.yaml", "--quiet")
    second = tuner("run", "toy.yaml", "--quiet")
    third = tuner("resume", "toy", "--quiet")
    assert first.stdout == second.stdout == third.stdout
    assert len(machine.starts) == 5


def test_quiet_prints_only_the_recommendation(machine):
    lines = tuner("run", "toy.yaml", "--quiet").stdout.strip().splitlines()
    assert lines[0] == "Recommendation of study toy (short profile)"


def test_json_log_is_one_object_a_line_and_ends_with_the_recommendation(machine):
    lines = tuner("run", "toy.yaml", "--json-log").stdout.splitlines()
    objects = [json.loads(line) for line in lines]
    assert {"launch", "block", "score", "confirmation", "done"} <= {each["kind"] for each in objects}
    assert objects[-1]["kind"] == "recommendation"
    assert objects[-1]["study"] == "toy"


def test_launches_are_a_total_and_more_adds(machine):
    tuner("run", "toy.yaml", "--launches", 4)
    assert len(machine.starts) == 4
    tuner("run", "toy.yaml", "--launches", 4)
    assert len(machine.starts) == 4
    result = tuner("resume", "toy", "--more", 1)
    assert result.exit_code == 0
    assert len({str(settings) for settings in machine.starts}) == 3


def test_a_study_may_have_another_name_and_database(machine, tmp_path):
    url = f"sqlite:///{tmp_path / 'other.db'}"
    assert tuner("run", "toy.yaml", "--study", "second", "--storage", url).exit_code == 0
    assert (tmp_path / "other.db").is_file()
    assert not (tmp_path / "studies" / "second" / "study.db").exists()
    assert "second" in tuner("list", "--storage", url).stdout
    assert tuner("recommend", "second", "--storage", url).exit_code == 0
    assert tuner("recommend", "second").exit_code == 2


def test_list_and_status_show_where_a_study_stands(machine):
    assert "no studies here" in tuner("list").stdout
    tuner("run", "toy.yaml")
    line = next(line for line in tuner("list").stdout.splitlines() if line.startswith("toy"))
    assert line.split()[1:4] == ["done", "5/5", "2"]
    assert line.endswith("keep the baseline")
    status = tuner("status", "toy").stdout
    assert re.search(r"state: +done", status)
    assert re.search(r"launches: +5 of 5", status)
    assert re.search(r"failures: +none", status)
    place = rf"^place: +{re.escape(hostname())}: 5 launches, 10 blocks.*no worker; last heard of"
    assert re.search(place, status, re.M)
    assert re.search(r"^decision: +no winner overall: keep the baseline", status, re.M)


def test_status_names_the_workers_that_are_alive(machine):
    tuner("run", "toy.yaml")
    store = open_study("toy")
    for device in ("0", "1"):
        acquire(store.engine, "toy", place=Place(hostname(), (device,)))
    store.close()
    status = tuner("status", "toy").stdout
    assert "and 1 other workers" not in status
    assert re.search(r"state: .*by process \d+ on \S+ and 1 other worker$", status, re.M)
    for device in ("0", "1"):
        assert re.search(rf"^place: .*/{device}: process \d+ at work, lease renewed \d+ s ago", status, re.M)


def test_a_study_whose_tuner_is_dead_is_listed_as_killed_and_has_nothing_running(machine):
    tuner("run", "toy.yaml")
    store = open_study("toy")
    store.set_state("running")
    store.trials.begin("baseline", store.data().baseline.id, None)
    store.close()
    line = next(line for line in tuner("list").stdout.splitlines() if line.startswith("toy"))
    assert line.split()[1] == "killed"
    status = tuner("status", "toy").stdout
    assert re.search(r"state: +killed; go on with tuner resume toy", status)
    assert re.search(r"trials: .*1 unfinished", status)
    assert "running" not in re.search(r"trials: .*", status)[0]


def test_status_counts_failures_by_class(machine):
    crash = Failure("oom_startup", "ready", "no memory")
    machine.fails = lambda phase, settings, count: crash if settings.get("num_steps") and phase == "ready" else None
    result = tuner("run", "toy.yaml")
    assert result.exit_code == 1
    assert "none of 2 candidates has a valid pair" in result.stdout
    assert re.search(r"failures: +2 oom_startup", tuner("status", "toy").stdout)


def test_recommend_as_json(machine):
    tuner("run", "toy.yaml")
    found = json.loads(tuner("recommend", "toy", "--json").stdout)
    assert found["state"] == "done"
    assert [choice["concurrency"] for choice in found["per_concurrency"]] == [1, 8]


def test_a_failed_baseline_ends_with_1_and_says_why_and_where(machine):
    machine.fails = lambda phase, settings, count: (
        Failure("startup_crash", "ready", "kaboom") if phase == "ready" else None
    )
    result = tuner("run", "toy.yaml")
    assert result.exit_code == 1
    assert "startup_crash (ready): kaboom" in result.stderr
    assert "launch-1.log" in result.stderr
    assert "Traceback" not in result.output
    assert "not done (stopped)" in tuner("recommend", "toy").stderr
    machine.fails = lambda phase, settings, count: None
    assert tuner("resume", "toy").exit_code == 0


def test_a_broken_machine_ends_with_3(machine):
    broken = Failure("env_broken", "start", "no disk", blame="environment")
    machine.fails = lambda phase, settings, count: broken
    result = tuner("run", "toy.yaml")
    assert result.exit_code == 3
    assert "no disk" in result.stderr


# -- bad input: a message, exit code 2, nothing started -------------------------------------------------------------


def bad(result, *says):
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    for each in says:
        assert each in result.output.replace("\n", " "), result.output


def test_a_changed_space_is_refused_and_a_new_name_offered(machine):
    tuner("run", "toy.yaml")
    started = len(machine.starts)
    bad(
        tuner("run", "toy.yaml", "--set", "parameters.num_steps.high=2"),
        "parameters.num_steps.high: was 4, is now 2",
        "--study toy-2",
    )
    bad(tuner("run", "toy.yaml", "--profile", "full"), "profile: was 'short', is now 'full'")
    assert len(machine.starts) == started


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run"], "name one space file"),
        (["run", "gone.yaml"], "there is no space file gone.yaml"),
        (["run", "quickstrt.yaml"], "did you mean 'quickstart.yaml'"),
        (["run", "."], "is a folder"),
        (["run", "toy.yaml", "--set", "workload.concurency=[1]"], "did you mean 'concurrency'"),
        (["run", "toy.yaml", "--set", "workload"], "a.b=c"),
        (["run", "toy.yaml", "--set", "workload.concurrency=[0]"], "above 0"),
        (["run", "toy.yaml", "--set", "parameters.num_steps.when=speculation == 'x'"], "can never hold"),
        (["run", "toy.yaml", "--profile", "shrt"], "did you mean 'short'"),
        (["run", "toy.yaml", "--study", "../up"], "not usable as a study's name"),
        (["run", "toy.yaml", "--launches", "1"], "only the baseline"),
        (["run", "toy.yaml", "--launches", "x"], "valid integer"),
        (["run", "toy.yaml", "--launchs", "3"], "--launches"),
        (["run", "toy.yaml", "--storage", "nonsense"], "not a database URL"),
        (["check", "gone.yaml"], "there is no space file"),
        (["resume", "gone"], "there is no study 'gone'"),
        (["status", "../../etc"], "not usable as a study's name"),
        (["recommend", "gone"], "there is no study 'gone'"),
        (["reccomend", "x"], "recommend"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(machine, tmp_path, arguments, says):
    bad(tuner(*arguments), says)
    assert machine.starts == []
    assert not (tmp_path / "studies").exists()


def test_an_unknown_study_is_answered_with_the_nearest(machine):
    tuner("run", "toy.yaml")
    bad(tuner("status", "tyo"), "Did you mean 'toy'?")


def test_check_says_what_would_be_tried(machine):
    result = tuner("check", "toy.yaml")
    assert result.exit_code == 0
    assert "valid. 7 candidates beside the baseline, 3 parameters, 1 rule." in result.stdout
    result = tuner("check", "toy.yaml", "--set", "parameters.num_steps.high=0")
    bad(result, "low 1 is above high 0")


def test_help_names_every_command():
    result = tuner("--help")
    assert result.exit_code == 0
    for command in ("run", "resume", "list", "status", "report", "recommend", "export", "bench", "check"):
        assert re.search(rf"\b{command}\b", result.stdout)
        assert tuner(command, "--help").exit_code == 0


def test_version():
    assert re.fullmatch(r"\d+\.\d+.*\n", tuner("--version").stdout)
