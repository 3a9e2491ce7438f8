from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tuner.study.test_study_controller import run
from tests.tuner.study.toy_study import SPACE, ToyEngine, ToyMachine, block, space
from tuner.errors import UsageError
from tuner.export.choose import choose
from tuner.judge.pareto import front
from tuner.records import Percentiles, Verdict
from tuner.report.content import report
from tuner.report.document import Scatter
from tuner.report.html import html
from tuner.report.markdown import markdown
from tuner.report.view import study_view
from tuner.space.schema import SloSection
from tuner.study.data import StoredTrial
from tuner.study.decide import pareto_set, recommendation
from tuner.study.goodput import goodput, keeps
from tuner.study.planner import finalists, without_gain
from tuner.study.policy import Policy
from tuner.study.race import race, too_slow
from tuner.study.score import score, weights


def crossing(settings, level):  # type: ignore[no-untyped-def]
    """Depth helps one stream and harms eight."""
    steps = settings.get("num_steps", 0)
    return 100 * level * (1 + 0.1 * steps if level == 1 else 1.06 - 0.02 * steps if steps else 1)


def searched(tmp_path: Path, *overrides: str):  # type: ignore[no-untyped-def]
    of = space(SPACE, "budget.launches=100", "parameters.disable_batch_threshold.choices=[never]", *overrides)
    return run(tmp_path, ToyMachine(speed=crossing), the_space=of)[0]


@pytest.mark.parametrize(
    ("objective", "steps"),
    [
        (("objective.maximize=latency",), 4),
        (("objective.maximize=throughput", "objective.concurrency=8", "objective.guard.min_speedup=0.5"), 1),
        (("objective.maximize=throughput", "objective.concurrency=1"), 4),
        (("objective.maximize=goodput", "objective.slo={tpot_ms: 1000}"), 1),
        (("objective.maximize=goodput", "objective.slo={tpot_ms: 8.5}"), 4),
    ],
)
def test_the_objective_decides_who_wins(tmp_path: Path, objective: tuple[str, ...], steps: int) -> None:
    found = recommendation(searched(tmp_path, *objective, "objective.guard.min_speedup=0.5"))
    assert found.overall.winner is not None
    assert found.overall.winner.settings["num_steps"] == steps
    assert any("Overall means" in line for line in found.advice)


@pytest.mark.parametrize("limit", ["ttft_ms: 1", "tpot_ms: 2", "e2e_ms: 20"])
def test_where_nobody_keeps_the_limits_nobody_wins_and_that_is_said(tmp_path: Path, limit: str) -> None:
    slo = f"objective.slo={{{limit}}}"
    found = recommendation(searched(tmp_path, "objective.maximize=goodput", slo, "objective.guard.min_speedup=0.5"))
    assert found.overall.winner is None
    assert found.overall.finalist is None
    assert "nobody has goodput" in found.overall.why
    assert all(choice.finalist or choice.winner for choice in found.per_concurrency)
    (said,) = [line for line in found.advice if line.startswith("No block keeps these limits")]
    assert "the lowest p90 of" in said


def test_where_nobody_has_goodput_only_the_best_at_each_level_are_confirmed(tmp_path: Path) -> None:
    data = searched(tmp_path, "objective.maximize=goodput", "objective.slo={tpot_ms: 2}")
    steps = {trial.candidate_id: data.settings_of(trial.candidate_id).get("num_steps", 0) for trial in data.trials}
    assert {2, 3} & set(steps.values())
    # The first one measured is neither.
    order = sorted(data.trials, key=lambda trial: trial.kind != "baseline" and steps[trial.candidate_id] not in (2, 3))
    chosen = finalists(replace(data, trials=tuple(order), confirmations=()), Policy(), 4)
    assert sorted(steps[candidate] for candidate in chosen) == [1, 4]


def test_who_misses_the_guard_within_noise_is_confirmed_and_who_misses_it_by_more_is_not(tmp_path: Path) -> None:
    """One block says no more; the confirmation's pairs decide."""
    data = replace(searched(tmp_path, "objective.guard.min_speedup=0.5"), confirmations=())
    best = max(data.scored, key=lambda trial: score(data, trial.candidate_id).value)
    least = math.exp(min(score(data, best.candidate_id).ratios.values()))

    alone = (data.trials[0], *(trial for trial in data.trials if trial.candidate_id == best.candidate_id))

    def chosen(guard: float, most: int, trials: tuple[StoredTrial, ...] = data.trials) -> tuple[str, ...]:
        of = space(SPACE, f"objective.guard.min_speedup={guard}", "budget.launches=100")
        again = replace(data, space=of, trials=trials)
        assert (score(again, best.candidate_id).constraints["min_speedup"] > 0) == (guard > least)
        return finalists(again, Policy(max_finalists=most), 4)

    assert chosen(least - 0.01, 1) == (best.candidate_id,)
    keeps_it, close = chosen(least + 0.01, 2)
    assert close == best.candidate_id, "behind the best that keeps the guard"
    assert keeps_it != close
    assert chosen(least + 0.01, 1, alone) == (best.candidate_id,), "nobody else promises anything"
    assert not too_slow(
        replace(data, space=space(SPACE, f"objective.guard.min_speedup={least + 0.01}")), best.candidate_id
    )
    assert too_slow(replace(data, space=space(SPACE, f"objective.guard.min_speedup={least + 0.3}")), best.candidate_id)


def test_a_limit_that_no_block_tells_is_named_and_the_mean_time_per_token_stands_in(tmp_path: Path) -> None:
    data = searched(tmp_path, "objective.guard.ttft_p90_ms=1000", "objective.guard.tpot_p90_ms=1000")
    blind = Percentiles(0, None, None, None, None)
    blocks = {i: replace(b, block=replace(b.block, ttft_ms=blind, tpot_ms=blind)) for i, b in data.blocks.items()}
    told, untold = recommendation(data).advice, recommendation(replace(data, blocks=blocks)).advice
    assert not any("was held against" in line for line in told)
    assert [line for line in untold if "was held against" in line] == [
        "Nothing was held against objective.guard.ttft_p90_ms, for no block tells that latency."
    ]
    slow = space(SPACE, "objective.guard.tpot_p90_ms=0.001", "budget.launches=100")
    strict = replace(data, blocks=blocks, space=slow)
    assert all(score(strict, t.candidate_id).constraints["tpot_p90"] > 0 for t in strict.scored if t.kind == "measured")


def test_an_objective_of_one_level_gives_it_all_weight(tmp_path: Path) -> None:
    data = searched(tmp_path, "objective.maximize=latency")
    assert weights(data) == {1: 1.0, 8: 0.0}


def test_pareto_names_who_is_not_dominated(tmp_path: Path) -> None:
    data = searched(tmp_path, "objective.maximize=pareto", "objective.guard.min_speedup=0.5")
    (line,) = [line for line in recommendation(data).advice if line.startswith("Pareto set")]
    best = {max(data.candidates.values(), key=lambda c: crossing(c.settings, level)).id: level for level in (1, 8)}
    for candidate in best:
        assert candidate in line
    assert "the baseline" not in line


def test_a_pareto_study_shows_its_set_and_leaves_the_choice_to_its_owner(tmp_path: Path) -> None:
    data = searched(tmp_path, "objective.maximize=pareto", "objective.guard.min_speedup=0.5")
    found, view = pareto_set(data), study_view(data)
    assert len(found) > 1
    (part,) = [each for each in report(view).sections if each.title == "Pareto set"]
    (chart,) = [block for block in part.blocks if isinstance(block, Scatter)]
    assert {curve.firm for curve in chart.curves} <= {True, False}
    assert sum(curve.firm for curve in chart.curves) == len(found)
    assert all(len(curve.points) == len(data.levels) for curve in chart.curves if curve.firm)
    confirmed = [point for curve in chart.curves for point in curve.points if point.low is not None]
    assert confirmed
    assert all(point.low < point.y < point.high for point in confirmed if point.high is not None)
    page, twin = html(report(view)), markdown(report(view))
    for text in (page, twin):
        assert "Pareto set" in text
        assert all(one in text for one in found)
    assert "(in the set)" in page
    with pytest.raises(UsageError, match="--candidate ID") as refused:
        choose(data)
    assert all(one in str(refused.value) for one in found)
    assert choose(data, found[0]).provenance.candidate == found[0]


def test_for_pareto_a_gain_at_any_level_is_one(tmp_path: Path) -> None:
    """What is gained at one stream is lost at eight, so that the mean over the levels never rises."""

    def even(settings, level):  # type: ignore[no-untyped-def]
        gain = 1 + 0.1 * settings.get("num_steps", 0)
        return 100 * level * (gain if level == 1 else 1 / gain)

    few = ("budget.launches=100", "parameters.disable_batch_threshold.choices=[never]")
    of = space(SPACE, *few, "objective.maximize=pareto", "objective.guard.min_speedup=0.5")

    def problems(settings):  # type: ignore[no-untyped-def]
        schedule = "steps_by_batch" in settings or settings.get("disable_batch_threshold", "never") != "never"
        return ["no schedules here"] if schedule else []

    data = run(tmp_path, ToyMachine(speed=even), the_space=of, engine=ToyEngine(problems=problems))[0]
    assert len(data.measured) == 4
    rising = sorted(data.trials, key=lambda trial: data.settings_of(trial.candidate_id).get("num_steps", 0))
    assert without_gain(replace(data, trials=tuple(rising))) == 0
    assert without_gain(replace(data, trials=tuple(reversed(rising)))) == 3, "the deepest came first"


def test_another_objective_has_no_set_to_choose_from(tmp_path: Path) -> None:
    data = searched(tmp_path)
    assert not [each for each in report(study_view(data)).sections if each.title == "Pareto set"]
    assert choose(data).provenance.candidate


def test_a_baseline_that_breaks_the_guard_on_the_first_token_is_named(tmp_path: Path) -> None:
    told = recommendation(searched(tmp_path / "strict", "objective.guard.ttft_p90_ms=1")).advice
    named = [line for line in told if "baseline itself breaks the guard at concurrency 1" in line]
    assert len(named) == 1
    assert "limit 1 ms" in named[0]
    kept = recommendation(searched(tmp_path / "loose", "objective.guard.ttft_p90_ms=60000")).advice
    assert not [line for line in kept if "baseline itself" in line]


def verdict(speedup: float, half: float = 0.01) -> Verdict:
    return Verdict("", 1, 8, speedup, speedup - half, speedup + half, 0.95, "better", None)


def test_domination_needs_intervals_that_are_apart() -> None:
    good, better, other = ({1: verdict(a), 8: verdict(b)} for a, b in ((1.1, 1.1), (1.105, 1.1), (0.9, 1.3)))
    assert front({"good": good, "better": better, "other": other}) == ("good", "better", "other")
    assert front({"good": good, "best": {1: verdict(1.2), 8: verdict(1.1)}}) == ("best",)
    assert front({"worse": {1: verdict(0.9), 8: verdict(0.95)}}) == ("",)


def test_goodput_is_the_most_that_keeps_the_limits() -> None:
    slow = Percentiles(64, 900.0, 900.0, 1500.0, None)
    blocks = [block(1, "screen", 100.0), block(8, "screen", 500.0), replace(block(32, "screen", 900.0), ttft_ms=slow)]
    slo = SloSection(ttft_ms=1000)
    assert [keeps(one, slo) for one in blocks] == [True, True, False]
    assert goodput(blocks, slo) == 500.0
    assert goodput(blocks, SloSection(ttft_ms=1)) == 50.0
    assert math.isclose(goodput(blocks, SloSection(tpot_ms=1000, e2e_ms=1e9)), 900.0)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("objective.maximize=latency", "workload.concurrency=[4, 8]"), "one stream"),
        (("objective.maximize=throughput", "objective.concurrency=5"), "not among workload.concurrency"),
        (("objective.concurrency=8",), "no meaning with 'speedup'"),
        (("objective.maximize=goodput",), "goodput needs objective.slo"),
        (("objective.slo={ttft_ms: 100}",), "no meaning with 'speedup'"),
        (("objective.maximize=goodput", "objective.slo={ttft_ms: 100, e2e_ms: 50}"), "contradict"),
        (("objective.maximize=goodput", "objective.slo={}"), "is empty"),
        (
            ("objective.maximize=goodput", "objective.slo={ttft_ms: 100}", "objective.guard.ttft_p90_ms=50"),
            "contradicts",
        ),
        (("objective.maximize=pareto", "workload.concurrency=[8]"), "only one"),
        (("objective.guard.min_speedup=97",), "no setting makes"),
        (("objective.maximize=latencyy",), "did you mean 'latency'"),
    ],
)
def test_an_objective_whose_parts_contradict_is_an_error_of_the_space(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        space(SPACE, *overrides)


def test_a_winner_overall_and_none_at_a_level_is_explained(tmp_path: Path) -> None:
    from tuner.study.decide import recommendation as decided

    data = searched(tmp_path)
    found = decided(data)
    said = [line for line in found.advice if "at no single level" in line]
    assert bool(said) == (found.overall.winner is not None and not any(c.winner for c in found.per_concurrency))


class Late(ToyMachine):
    """Two drafts are the fastest at eight streams, and late with the first token there."""

    def measure(self, server, record, **given):  # type: ignore[no-untyped-def]
        found = super().measure(server, record, **given)
        if given["concurrency"] == 8 and record.settings.get("num_steps") == 2:
            found.block = replace(found.block, ttft_ms=Percentiles(64, 900.0, 900.0, 900.0, None))
        return found


def test_who_breaks_a_guard_on_latencies_takes_nobodys_place_at_its_level(tmp_path: Path) -> None:
    rates = {None: (1.0, 1.0), 1: (1.6, 1.1), 2: (0.98, 1.4), 3: (0.98, 1.2)}
    few = ("rules=[]", "parameters.disable_batch_threshold.choices=[never]", "parameters.num_steps.high=3")
    the_space = space(SPACE, "budget.launches=40", "objective.guard.ttft_p90_ms=500", *few)
    machine = Late(speed=lambda settings, level: 100 * level * rates[settings.get("num_steps")][level == 8])
    data, _, _ = run(tmp_path, machine, the_space=the_space, policy=Policy(fewest=99))
    steps = [data.settings_of(candidate)["num_steps"] for candidate in data.confirmations[0].finalists]
    assert steps == [1, 3], "the best overall, and the best at eight that is in time"
    assert recommendation(data).per_concurrency[1].winner.settings["num_steps"] == 3
    third = next(t for t in data.measured if data.settings_of(t.candidate_id)["num_steps"] == 3)
    assert race(data, third.slot).levels == (8,), "nor does it drive others out of the race there"
