"""What crashes teach: regions of settings are left alone, and opened again by what works in them."""

from __future__ import annotations

import itertools
import json
import random
import re
from dataclasses import replace
from typing import Any

import pytest

from tests.tuner.study.toy_study import ToyMachine, controller, space, study
from tuner.records import Failure
from tuner.search.crashes import Crash, Crashes, Regions, crash_region
from tuner.study.crashes import CrashMemory, Elsewhere, crashes_seen, most_crashes
from tuner.study.policy import Policy

SPACE = """
name: toy
engine: {kind: fake, model: toy}
workload: {concurrency: [1], max_tokens: 64}
baseline: {backend: a}
parameters:
  steps: {low: 1, high: 7}
  topk: {choices: [1, 2, 4, 8]}
  backend: {choices: [a, b, c]}
budget: {launches: 60, candidates: 200}
profile: short
"""
"""Three knobs, 84 combinations (docs/failures.md, D18)."""


def works(settings: Any) -> bool:
    """Half of them do, and the best of those stand at the edge."""
    return settings.get("steps", 1) * settings.get("topk", 1) <= {"a": 6, "b": 10, "c": 14}[settings["backend"]]


def value(settings: Any, level: int) -> float:
    return 80 + 2 * settings.get("steps", 1) + settings.get("topk", 1) + {"a": 0, "b": 2, "c": 4}[settings["backend"]]


def crash(phase: str, settings: Any, _count: int) -> Failure | None:
    return Failure("startup_crash", "start", "it ended") if phase == "start" and not works(settings) else None


def test_a_kind_of_candidate_that_crashes_is_ruled_out_with_what_they_have_in_common():
    crashed = [{"topk": 4, "backend": "x", "steps": n} for n in (1, 3, 5)]
    worked = [{"topk": 2, "backend": "x", "steps": 3}, {"topk": 4, "backend": "y", "steps": 5}]
    found = crash_region({"topk": 8, "backend": "x", "steps": 2}, crashed, worked)
    assert found is not None
    assert {str(condition) for condition in found.conditions} == {"topk >= 4", "backend = x"}
    assert found.crashes == 3
    assert crash_region({"topk": 8, "backend": "y", "steps": 2}, crashed, worked) is None
    assert crash_region({"topk": 1, "backend": "x", "steps": 2}, crashed, worked) is None


def test_one_chance_failure_rules_nothing_out():
    worked = [{"topk": 1, "backend": "x"}, {"topk": 2, "backend": "y"}]
    assert crash_region({"topk": 8, "backend": "x"}, [{"topk": 4, "backend": "x"}], worked) is None


def test_one_that_works_opens_a_region_again():
    crashed = [{"topk": 4, "steps": 1}, {"topk": 4, "steps": 3}, {"topk": 8, "steps": 3}]
    worked = [{"topk": 1, "steps": 2}, {"topk": 2, "steps": 4}]
    assert crash_region({"topk": 8, "steps": 1}, crashed, worked) is not None
    assert crash_region({"topk": 8, "steps": 1}, crashed, [*worked, {"topk": 8, "steps": 2}]) is None


def test_a_setting_that_is_not_active_meets_no_condition():
    crashed = [{"speculation": "ngram", "steps": 5}, {"speculation": "ngram", "steps": 6}]
    worked = [{"speculation": "none"}, {"speculation": "ngram", "steps": 1}]
    assert crash_region({"speculation": "none"}, crashed, worked) is None
    found = crash_region({"speculation": "ngram", "steps": 7}, crashed, worked)
    assert str(found) == "2 of 2 candidates with steps >= 5 crashed"


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["model", "tpe"])
def test_at_most_ten_of_sixty_launches_are_invalid_on_the_toy_space_and_none_is_repeated(tmp_path, sampler):
    half = sum(works(dict(zip(("steps", "topk", "backend"), each, strict=True))) for each in _all())
    assert 40 <= half <= 44
    machine = ToyMachine(speed=value, fails=crash)
    store = study(tmp_path, space(SPACE, f"sampler={sampler}"))
    data = controller(store, machine, policy=Policy(pairs=0, no_gain=99)).run()
    crashed = [launch for launch in data.launches if launch.failure]
    assert len(crashed) <= 10
    assert len({launch.slot for launch in crashed}) == len(crashed), "a known crash was launched again"
    named = [trial.why for trial in data.trials if trial.kind == "known_crash"]
    # The model leaves such regions alone by itself; what another sampler proposes there is refused, and says why.
    assert named or sampler == "model"
    assert all(re.search(r"candidates with .* crashed \(trial \d+, trial \d+", why) for why in named)


def _all() -> Any:
    return itertools.product(range(1, 8), (1, 2, 4, 8), "abc")


def test_crashes_of_other_studies_on_the_same_machine_count(tmp_path):
    memory = CrashMemory(tmp_path / "crashes.jsonl")
    first = study(tmp_path, space(SPACE, "budget.launches=4"), "first").data()
    for steps in (4, 5):
        first_crash = Failure("startup_crash", "start", "it ended")
        candidate = type(first.baseline)({"steps": steps, "topk": 8, "backend": "a"})
        memory.remember(first, candidate, first_crash)
    folder = tmp_path / "second"
    folder.mkdir()
    second = study(folder, space(SPACE, "budget.launches=9"), "second").data()
    elsewhere = memory.elsewhere(second)
    assert elsewhere.crashed == elsewhere.telling
    assert len(elsewhere.crashed) == 2
    here = Crash({"topk": 4, "backend": "b"}, "trial 7")
    worked = ({"topk": 1, "backend": "a"}, {"topk": 2, "backend": "b"})
    seen = replace(crashes_seen(second, elsewhere), crashed=(here,), worked=worked)
    found = seen.region({"steps": 1, "topk": 8, "backend": "c"})
    assert str(found) == "3 of 3 candidates with topk >= 4 crashed (trial 7, study first)"
    assert memory.elsewhere(first) == Elsewhere(), "its own are in its records"
    other = study(folder, space(SPACE, "engine.model=other"), "other").data()
    assert memory.elsewhere(other) == Elsewhere()


def test_what_worked_elsewhere_is_not_to_blame_for_what_crashed_there(tmp_path):
    """As a space of another study has it: what all that crashed had in common worked there with other settings."""
    memory = CrashMemory(tmp_path / "crashes.jsonl")
    first = study(tmp_path, space(SPACE, "budget.launches=4"), "first").data()
    made = type(first.baseline)
    memory.works(first, made({"steps": 4, "topk": 2, "backend": "a"}))
    assert not memory.path.exists(), "while nothing crashed there is nothing to keep"
    for steps in (4, 5, 6):
        crash = Failure("startup_crash", "start", "it ended")
        memory.remember(first, made({"steps": steps, "topk": 2, "backend": "c"}), crash)
    folder = tmp_path / "second"
    folder.mkdir()
    second = study(folder, space(SPACE, "budget.launches=9"), "second").data()
    like, unlike = {"steps": 5, "topk": 2, "backend": "a"}, {"steps": 4, "topk": 1, "backend": "c"}
    worked_here = ({"backend": "b"},)  # nothing yet that has steps at all
    before = replace(crashes_seen(second, memory.elsewhere(second)), worked=worked_here)
    assert "topk >= 2" in str(before.region(like)) or "steps" in str(before.region(like))
    for backend in "ab":
        memory.works(first, made({"steps": 4, "topk": 2, "backend": backend}))
        memory.works(first, made({"steps": 5, "topk": 2, "backend": backend}))
    size = memory.path.stat().st_size
    memory.works(first, made({"steps": 4, "topk": 2, "backend": "a"}))
    assert memory.path.stat().st_size == size, "it is kept once"
    after = replace(crashes_seen(second, memory.elsewhere(second)), worked=worked_here)
    assert after.region(like) is None
    assert "backend = c" in str(after.region(unlike))


def test_crashes_of_other_studies_alone_ask_for_one_more(tmp_path):
    """Two that crashed there have much in common that is not to blame, and what would tell was never tried."""
    memory = CrashMemory(tmp_path / "crashes.jsonl")
    first = study(tmp_path, space(SPACE, "budget.launches=4"), "first").data()
    folder = tmp_path / "second"
    folder.mkdir()
    second = study(folder, space(SPACE, "budget.launches=9"), "second").data()
    worked, like = ({"topk": 1, "backend": "a"},), {"steps": 9, "topk": 4, "backend": "a"}

    def region(*here: Crash) -> object:
        seen = crashes_seen(second, memory.elsewhere(second))
        return replace(seen, crashed=here, worked=(*seen.worked, *worked)).region(like)

    for steps, ruled_out in ((2, False), (3, False), (5, True)):
        crashed = type(first.baseline)({"steps": steps, "topk": 4, "backend": "b"})
        memory.remember(first, crashed, Failure("startup_crash", "start", "it ended"))
        assert (region() is not None) == ruled_out
    memory.forget(first.uid)
    memory.remember(first, crashed, Failure("startup_crash", "start", "it ended"))
    assert region() is None
    assert region(Crash({"steps": 1, "topk": 4, "backend": "a"}, "trial 3")), "with one of its own two are enough"


@pytest.mark.parametrize(
    "strange",
    [
        {"uid": ["x"]},
        {"context": ["q"]},
        {"settings": {"num_steps": [1]}},
        {"settings": [1]},
        {"settings": None},
        {"key": {}},
        {"study": 3},
    ],
)
@pytest.mark.parametrize("kind", ["crash", "worked"])
def test_entries_that_are_none_are_passed_over(tmp_path, kind, strange):
    memory = CrashMemory(tmp_path / "crashes.jsonl")
    first = study(tmp_path, space(SPACE, "budget.launches=4"), "first").data()
    candidate = type(first.baseline)({"steps": 4, "topk": 2, "backend": "c"})
    memory.remember(first, candidate, Failure("startup_crash", "start", "it ended"))
    rows = [json.loads(row) for row in memory.path.read_text().splitlines()]
    of_kind = next(row for row in rows if ("worked" in row) == (kind == "worked"))
    memory.path.write_text("".join(json.dumps(row) + "\n" for row in (*rows, {**of_kind, **strange})))
    folder = tmp_path / "second"
    folder.mkdir()
    second = study(folder, space(SPACE, "budget.launches=9"), "second").data()
    assert memory.known(second, candidate)
    assert len(memory.elsewhere(second).crashed) == 1
    assert crashes_seen(second, memory.elsewhere(second)).region({"steps": 1, "topk": 1, "backend": "a"}) is None


def test_from_crashes_beside_which_nothing_is_known_to_have_worked_no_region_is_learned(tmp_path):
    """As earlier versions have kept them: the candidates themselves are left alone, and no others."""
    memory = CrashMemory(tmp_path / "crashes.jsonl")
    first = study(tmp_path, space(SPACE, "budget.launches=4"), "first").data()
    for steps in (4, 5):
        crashed = type(first.baseline)({"steps": steps, "topk": 2, "backend": "c"})
        memory.remember(first, crashed, Failure("startup_crash", "start", "it ended"))
    rows = [row for row in memory.path.read_text().splitlines() if '"worked"' not in row]
    memory.path.write_text("\n".join(rows) + "\n")
    folder = tmp_path / "second"
    folder.mkdir()
    second = study(folder, space(SPACE, "budget.launches=9"), "second").data()
    elsewhere = memory.elsewhere(second)
    assert (len(elsewhere.crashed), elsewhere.telling) == (2, ())
    assert crashes_seen(second, elsewhere).region({"steps": 4, "topk": 2, "backend": "a"}) is None
    assert memory.known(second, crashed)


def test_the_share_of_crashes_that_a_search_pays_for_is_small():
    assert most_crashes(60) == 7
    assert most_crashes(8) == 3


def test_the_sampler_and_the_study_leave_the_same_candidates_alone() -> None:
    universe = [dict(zip(("steps", "topk", "backend"), each, strict=True)) for each in _all()]
    seen = random.Random(3).sample(range(len(universe)), 25)
    failed, worked = ([i for i in seen if works(universe[i]) is ok] for ok in (False, True))
    regions = Regions([Crash(universe[i]) for i in failed], [universe[i] for i in worked])
    chance = Crashes(universe, (1,)).works(failed, worked, failed)
    ruled_out = {i for i, settings in enumerate(universe) if regions.of(settings)}
    assert len(ruled_out - set(failed)) > 3
    assert {i for i in range(len(universe)) if chance[i] == 0} == ruled_out | set(failed)
