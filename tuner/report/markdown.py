"""A study as Markdown: the decision first, then what it rests on. A pure function of the view."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from tuner.judge.recommend import percent
from tuner.judge.text import settings_line, verdict_phrase
from tuner.records import Choice
from tuner.report.view import CandidateView, FailureView, LevelRow, StudyView

EVIDENCE_LINES = 16
CELL = 140
"""Characters of a failure message in a table; the whole of it stands in its own section."""

NONE = "–"


def markdown(view: StudyView) -> str:
    """The report, ending in a newline. It renders for every study, one in which everything failed included."""
    sections = [
        _head(view),
        _decision(view),
        _leaderboard(view),
        _failed(view),
        _gates(view),
        _settings(view),
        _machine(view),
        _method(view),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section) + "\n"


def _head(view: StudyView) -> list[str]:
    lines = [f"# Study {_inline(view.name)}"]
    if view.simulated:
        lines += ["", "**SIMULATED: every figure comes from a model of a machine, not from a measurement.**"]
    if view.state != "done":
        reason = f": {_inline(view.reason)}" if view.reason else ""
        lines += ["", f"**The study is not done ({view.state}{reason}).** This is what its records say so far."]
    return lines


def _decision(view: StudyView) -> list[str]:
    found = view.recommendation
    lines = ["## Decision", "", f"**Overall: {_choice(found.overall)}**  ", f"Because {_inline(found.overall.why)}."]
    if found.overall.winner is not None:
        lines += ["", f"Settings: `{settings_line(found.overall.winner.settings)}`"]
    elif found.overall.verdict is not None:
        best = found.overall.verdict
        lines += ["", f"Best finalist: {_code(best.candidate_id)}, {verdict_phrase(best)}."]
    rows = [
        [
            str(choice.concurrency),
            _choice(choice),
            _number(choice.baseline_tokens_per_s),
            _number(choice.winner_tokens_per_s),
            f"`{settings_line(choice.winner.settings)}`" if choice.winner is not None else "baseline",
            choice.why,
        ]
        for choice in found.per_concurrency
    ]
    lines += ["", *_table(["C", "Decision", "Baseline tok/s", "Winner tok/s", "Settings", "Because"], rows, "rlrrll")]
    return lines


def _choice(choice: Choice) -> str:
    if choice.winner is None or choice.verdict is None:
        return "no winner: keep the baseline"
    return f"winner {_code(choice.winner.id)}: {verdict_phrase(choice.verdict)}"


def _leaderboard(view: StudyView) -> list[str]:
    lines = [
        "## Leaderboard",
        "",
        "C: requests under way at once. Per request: tokens per second of one stream. Latency: of whole requests, in "
        "seconds. Ok: requests that ended well. Δ: change of throughput against the baseline in paired blocks; an "
        "interval is given only where the decision rests on one, and figures of the search are chosen for their luck.",
        "",
    ]
    rows = []
    for candidate in view.candidates:
        for i, row in enumerate(candidate.rows):
            name = f"{_code(candidate.id)} {_standing(candidate)}" if i == 0 else ""
            rows.append([name, str(row.concurrency), *_measured(row), _change(candidate, row)])
    head = ["Candidate", "C", "tok/s", "Per request", "Average", "p50", "p99", "Ok", "Δ to baseline"]
    return lines + _table(head, rows, "lrrrrrrrl")


def _standing(candidate: CandidateView) -> str:
    wins = f", wins at C {', '.join(map(str, candidate.wins_at))}" if candidate.wins_at else ""
    name = f"**{candidate.standing}**" if candidate.standing in ("baseline", "winner") else candidate.standing
    return name + wins


def _measured(row: LevelRow) -> list[str]:
    total = row.requests + row.failed_requests
    return [
        _number(row.tokens_per_s),
        _number(row.per_request_tokens_per_s),
        _seconds(row.latency.mean),
        _seconds(row.latency.p50),
        _seconds(row.latency.p99),
        f"{row.requests}/{total}" if total else NONE,
    ]


def _change(candidate: CandidateView, row: LevelRow) -> str:
    if row.tokens_per_s is None:
        return _inline(_short(candidate.why)) or ("no valid block" if row.attempts else "not measured")
    if candidate.standing == "baseline":
        return f"{row.blocks} block{'s' * (row.blocks != 1)}"
    if row.verdict is not None:
        return f"{verdict_phrase(row.verdict)}: {row.verdict.outcome}"
    if row.change is None:
        return "no valid block of the baseline beside it"
    where = "search" if row.role == "screen" else "confirmation"
    return f"{percent(row.change)} ({where}, {row.pairs} pair{'s' * (row.pairs != 1)})"


def _failed(view: StudyView) -> list[str]:
    ruled_out = [candidate for candidate in view.candidates if candidate.standing == "ruled out"]
    if not view.failures and not ruled_out:
        return ["## What failed", "", "Nothing."]
    lines = ["## What failed"]
    for failure in view.failures:
        lines += ["", *_failure(failure)]
    if ruled_out:
        lines += ["", "### Ruled out without a launch", ""]
        lines += [f"- {_code(c.id)} `{settings_line(c.settings)}`: {_inline(c.why)}" for c in ruled_out]
    return lines


def _failure(found: FailureView) -> list[str]:
    failure = found.failure
    launches = f"launch{'es' * (len(found.launches) != 1)} {', '.join(map(str, found.launches))}"
    blame = "the candidate's" if failure.blame == "candidate" else "the environment's, not held against the candidate"
    lines = [
        f"### {failure.kind} of {_code(found.candidate_id)}",
        "",
        f"{_inline(failure.message)}  ",
        f"In phase {failure.phase}, {launches}; {blame}. Log: {_code(found.log_path or 'none')}",
    ]
    if failure.evidence.strip():
        lines += ["", *_fenced(failure.evidence)]
    return lines


def _gates(view: StudyView) -> list[str]:
    if not view.invalid:
        return []
    rows = [
        [
            _code(bad.candidate_id),
            str(bad.concurrency),
            "search" if bad.role == "screen" else "confirmation",
            bad.gate,
            f"{bad.value:.4g}",
            f"{bad.limit:.4g}",
            _inline(bad.detail),
            "measured again" if bad.repeated else "no valid block",
        ]
        for bad in view.invalid
    ]
    head = ["Candidate", "C", "In", "Gate", "Value", "Limit", "Detail", "Then"]
    return [
        "## Blocks that do not count",
        "",
        "A gate found that these were not measured as they should; none of their figures is used.",
        "",
        *_table(head, rows, "lrllrrll"),
    ]


def _settings(view: StudyView) -> list[str]:
    rows = [
        [_code(c.id), _standing(c), f"`{settings_line(c.settings)}`", percent(c.overall) if c.overall else NONE]
        for c in view.candidates
    ]
    head = ["Candidate", "Standing", "Settings", "All levels"]
    lines = ["## Settings", "", "All levels: the weighted mean of the changes above, as the objective weighs them.", ""]
    lines += _table(head, rows, "lllr")
    if view.fixed_args or view.fixed_env:
        fixed = [*(f"{k}={_value(v)}" for k, v in view.fixed_args.items()), *_environment(view.fixed_env)]
        lines += ["", f"Fixed for all: {_code(' '.join(fixed))}"]
    if view.rules:
        lines += ["", "Rules:", "", *(f"- {_code(forbid)}: {_inline(why)}" for forbid, why in view.rules)]
    return lines


def _environment(env: Mapping[str, str | None]) -> Iterable[str]:
    return (f"env.{name}={value if value is not None else '(removed)'}" for name, value in env.items())


def _machine(view: StudyView) -> list[str]:
    machine = view.machine
    memory = machine.get("memory_gib")
    facts = [
        ("Engine", f"{view.engine} {view.engine_version}"),
        ("Model", view.model),
        ("Processor", machine.get("cpu")),
        ("Usable cores", machine.get("cores")),
        ("Memory", f"{memory} GiB" if memory is not None else None),
        ("GPUs", "; ".join(machine.get("gpus") or []) or "none"),
    ]
    return ["## Machine", "", *(f"- {name}: {_inline(str(v))}" for name, v in facts if v is not None)]


def _method(view: StudyView) -> list[str]:
    shares = ", ".join(f"{level} ({100 * view.level_weights[level]:.0f} %)" for level in view.levels)
    launches = ", ".join(f"{count} {state}" for state, count in view.launches.items()) or "none"
    started = datetime.fromtimestamp(view.created_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    lines = [
        "## How it was measured",
        "",
        f"- Study begun {started}, {view.elapsed_s / 60:.1f} minutes with a server, {view.profile} profile, "
        f"objective {view.objective}.",
        f"- Load: prompts {_code(view.prompts)}, up to {view.max_tokens} tokens, temperature {view.temperature:g}; "
        f"closed loop at concurrency {shares} (share in the objective).",
        f"- Launches: {view.launches_used} of {view.budget_launches} ({launches}); {view.valid_blocks} valid blocks.",
    ]
    if view.window_s is not None and view.warmup_s is not None:
        lines.append(
            f"- A block: {view.warmup_s:.1f} s of warm-up, then a window of {view.window_s:.1f} s at full concurrency "
            "with load kept on past its end (medians); tokens as the server's usage counts them."
        )
    rounds = [
        f"{len(r.finalists)} finalist{'s' * (len(r.finalists) != 1)} × {r.pairs} pair{'s' * (r.pairs != 1)}"
        for r in view.rounds
    ]
    planned = f"{view.pairs} pairs are planned per finalist and level"
    lines.append(
        f"- Confirmation on held-out prompts, each pair over fresh launches in mirrored order: "
        f"{'; '.join(rounds) or 'none yet'} ({planned} in this profile)."
    )
    if view.recommendation.advice:
        lines += ["", "What would make it firmer, and what to heed:", ""]
        lines += [f"- {_inline(note)}" for note in view.recommendation.advice]
    return lines


# -- Markdown itself ------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], align: str) -> list[str]:
    marks = {"l": ":--", "r": "--:"}
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join(marks[a] for a in align)} |"]
    return lines + [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|") or " "


def _inline(text: str) -> str:
    """Text that may hold anything, as one paragraph in which nothing is markup."""
    text = " ".join(text.split())
    for mark in "\\`*_[]<>#":
        text = text.replace(mark, "\\" + mark)
    return text


def _short(text: str) -> str:
    """The beginning of a text, for a cell."""
    text = " ".join(text.split())
    return text if len(text) <= CELL else text[: CELL - 1] + "…"


def _code(text: str) -> str:
    """Text as code, on one line; a backtick inside would end it."""
    text = " ".join(text.split())
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _fenced(text: str) -> list[str]:
    """Lines of a log as they are, in a fence that none of them can close."""
    lines = text.rstrip().splitlines()
    if len(lines) > EVIDENCE_LINES:
        half = EVIDENCE_LINES // 2
        lines = [*lines[:half], f"… {len(lines) - 2 * half} lines …", *lines[-half:]]
    fence = "```"
    while any(fence in line for line in lines):
        fence += "`"
    return [fence + "text", *lines, fence]


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.1f}"


def _seconds(milliseconds: float | None) -> str:
    return NONE if milliseconds is None else f"{milliseconds / 1000:.2f}"


def _value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict, bool)) else str(value)
