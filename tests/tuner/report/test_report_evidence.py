"""The figures behind the decision are those of the stored blocks, with intervals over launches alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

import pytest
from report_studies import reference, toy
from scipy import stats

from tuner.records import StoredBlock
from tuner.report.content import report
from tuner.report.evidence import PARTS, acceptance, estimate, evidence, latencies, round_times, shown
from tuner.report.importance import LEAST_TRIALS, effects, importances
from tuner.report.markdown import markdown
from tuner.report.view import study_view
from tuner.study.data import StudyData
from tuner.study.decide import recommendation


def changed(data: StudyData, counters: Callable[[StoredBlock], dict[str, float]]) -> StudyData:
    """The study with other counters in its blocks."""
    blocks = {i: replace(s, block=replace(s.block, counters=counters(s))) for i, s in data.blocks.items()}
    return replace(data, blocks=blocks)


def test_the_verdicts_shown_are_those_of_the_decision() -> None:
    data = reference()
    found = recommendation(data)
    by_level = {each.concurrency: each for each in evidence(data)}
    assert by_level[None].verdict == found.overall.verdict
    for choice in found.per_concurrency:
        assert by_level[choice.concurrency].verdict == choice.verdict
        ratios = by_level[choice.concurrency].ratios
        assert math.exp(fmean(map(math.log, ratios))) == pytest.approx(choice.verdict.speedup)  # type: ignore[union-attr]


def test_a_latency_change_is_the_mean_of_the_pairs_with_students_interval() -> None:
    data = reference()
    (candidate,) = shown(data, recommendation(data))
    told = latencies(data, [candidate])
    one = next(each for each in told if each.name == "whole request, average" and each.concurrency == 1)
    pairs = [p for p in data.pairs if p.role == "confirm" and p.candidate_id == candidate and p.concurrency == 1]
    logs = [
        math.log(data.blocks[p.candidate_block].block.e2e_ms.mean / data.blocks[p.baseline_block].block.e2e_ms.mean)  # type: ignore[operator]
        for p in pairs
    ]
    low, high = stats.t.interval(0.95, len(logs) - 1, loc=fmean(logs), scale=stats.sem(logs))
    assert (one.change.n, one.change.value) == (4, pytest.approx(math.exp(fmean(logs))))
    assert (one.change.low, one.change.high) == (pytest.approx(math.exp(low)), pytest.approx(math.exp(high)))
    assert not any("p99" in each.name for each in told), "blocks of under 100 requests have no p99"


def test_under_four_launches_there_is_no_interval() -> None:
    assert estimate([1.0, 2.0, 3.0]).low is None
    four = estimate([1.0, 2.0, 3.0, 4.0], floor=1.0)
    assert four.low == 1.0, "an interval stays within what is possible"
    assert four.high is not None


def test_acceptance_by_depth_is_a_share_of_verify_steps() -> None:
    def counters(stored: StoredBlock) -> dict[str, float]:
        return {"server_verify_steps": 100.0, "accepted_at_depth_1": 60.0, "accepted_at_depth_2": 30.0}

    data = changed(reference(), counters)
    (candidate,) = shown(data, recommendation(data))
    first = acceptance(data, [candidate])[0]
    assert [each.value for each in first.at_depth] == pytest.approx([0.6, 0.3])
    assert first.steps == 400


def test_a_level_without_speculation_says_so() -> None:
    data = reference()
    (candidate,) = shown(data, recommendation(data))
    at_eight = next(each for each in acceptance(data, [candidate]) if each.concurrency == 8)
    assert (at_eight.steps, at_eight.accept_length, at_eight.at_depth) == (0, None, ())
    assert "no speculation at this level" in markdown(report(study_view(data)))


def test_the_time_of_a_step_is_shown_where_the_counters_tell_and_said_to_be_unknown_elsewhere() -> None:
    def counters(stored: StoredBlock) -> dict[str, float]:
        drafts = 0.0 if stored.candidate_id == reference().baseline.id else 0.5
        spent = dict(zip(PARTS, (drafts, 2.0, 0.1, 0.2), strict=True))
        return {
            "server_rounds": 100.0,
            "server_generated": 150.0,
            "server_verify_steps": 100.0,
            **{f"server_{part}_s": seconds for part, seconds in spent.items()},
        }

    data = changed(reference(), counters)
    (candidate,) = shown(data, recommendation(data))
    baseline, mine, *_ = round_times(data, [candidate])
    assert baseline.candidate_id == data.baseline.id
    assert [part.value for part in mine.parts_ms] == pytest.approx([5.0, 20.0, 1.0, 2.0])
    assert mine.tokens.value == pytest.approx(1.5)
    text = markdown(report(study_view(data)))
    assert "| Draft ms | Verify ms | Draft cache ms | Other ms |" in text
    assert "is not known" in markdown(report(study_view(reference())))


def test_what_was_seen_with_each_value_counts_candidates() -> None:
    data = reference()
    told = {(each.name, each.value): each.change for each in effects(data)}
    assert told["num_steps", 3].n == 2
    assert told["disable_batch_threshold", 4].n == 4
    assert told["disable_batch_threshold", 4].low is not None
    assert ("speculation", "ngram") not in told, "a setting that was not varied says nothing"


def test_few_candidates_say_nothing_about_importance() -> None:
    assert importances(reference()) == ()
    assert importances(toy()) == ()
    assert f"takes {LEAST_TRIALS} or more" in " ".join(markdown(report(study_view(reference()))).split())


def test_importance_finds_the_setting_that_decides() -> None:
    data = reference()
    first = next(trial for trial in data.trials if trial.kind == "measured")
    candidates, trials, pairs = dict(data.candidates), [], list(data.pairs)
    pair = next(p for p in data.pairs if p.role == "screen")
    for number, steps in enumerate([1, 2, 3, 4, 5, 6, 7, 8] * 2):
        threshold = "never" if number < 8 else 4
        params = {"speculation": "ngram", "num_steps": steps, "disable_batch_threshold": threshold}
        candidate = type(data.baseline)(params)
        candidates[candidate.id] = candidate
        pairs.append(replace(pair, candidate_id=candidate.id))
        value = 0.3 - 0.05 * abs(steps - 4)
        trials.append(replace(first, number=number, candidate_id=candidate.id, params=params, value=value))
    made = replace(data, candidates=candidates, trials=tuple(trials))
    made.__dict__["pairs"] = tuple(pairs)
    found = importances(made)
    assert found[0].name == "num_steps"
    assert sum(each.share for each in found) == pytest.approx(1)
    assert {each.name for each in found} == {"num_steps", "disable_batch_threshold"}
