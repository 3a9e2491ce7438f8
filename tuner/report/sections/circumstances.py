"""What the figures rest on: blocks that do not count, settings, the machine, the method."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from tuner.judge.recommend import percent
from tuner.judge.text import settings_line
from tuner.report.document import (
    NONE,
    Block,
    Bullets,
    Heading,
    Line,
    Paragraph,
    Section,
    Words,
    code,
    line,
    section,
    strong,
    table,
)
from tuner.report.sections.leaderboard import standing
from tuner.report.view import StudyView
from tuner.report.words import count, value


def gates(view: StudyView) -> Section | None:
    """Blocks that a gate has invalidated; None without any."""
    if not view.invalid:
        return None
    rows = [
        [
            code(bad.candidate_id),
            str(bad.concurrency),
            {"look": "short look", "screen": "search", "edge": "beside a change"}.get(bad.role, "confirmation"),
            bad.gate,
            f"{bad.value:.4g}",
            f"{bad.limit:.4g}",
            bad.detail,
            "measured again" if bad.repeated else "no valid block",
        ]
        for bad in view.invalid
    ]
    head = ["Candidate", "C", "In", "Gate", "Value", "Limit", "Detail", "Then"]
    text = "A gate found that these were not measured as they should; none of their figures is used."
    return section(
        "Blocks that do not count", "What was left out?", [Paragraph(line(text)), table(head, rows, "lrllrrll")]
    )


def settings(view: StudyView) -> Section:
    """Every candidate's settings in full, and what was the same for all."""
    rows: list[list[Words]] = [
        [code(c.id), standing(c), code(settings_line(c.settings)), percent(c.overall) if c.overall else NONE]
        for c in view.candidates
    ]
    text = "All levels: the weighted mean of the changes above, as the objective weighs them."
    blocks: list[Block] = [
        Paragraph(line(text)),
        table(["Candidate", "Standing", "Settings", "All levels"], rows, "lllr", "Every candidate's settings."),
    ]
    if view.fixed_args or view.fixed_env:
        fixed = [*(f"{k}={value(v)}" for k, v in view.fixed_args.items()), *_environment(view.fixed_env)]
        blocks.append(Paragraph(line("Fixed for all: ", code(" ".join(fixed)))))
    if view.rules:
        rules = tuple(line(code(forbid), f": {because}") for forbid, because in view.rules)
        blocks += [Heading(line("Rules")), Bullets(rules)]
    return section("Settings", "What exactly was measured?", blocks)


def _environment(env: Mapping[str, str | None]) -> Iterable[str]:
    return (f"env.{name}={of if of is not None else '(removed)'}" for name, of in env.items())


def machine(view: StudyView) -> Section:
    """What it was measured on."""
    found = view.machine
    memory = found.get("memory_gib")
    facts = [
        ("Engine", f"{view.engine} {view.engine_version}"),
        ("Model", view.model),
        ("Processor", found.get("cpu")),
        ("Usable cores", found.get("cores")),
        ("Memory", f"{memory} GiB" if memory is not None else None),
        ("GPUs", "; ".join(found.get("gpus") or []) or "none"),
    ]
    items = tuple(line(f"{name}: {of}") for name, of in facts if of is not None)
    return section("Machine", "On what?", [Bullets(items), *_places(view)])


def _places(view: StudyView) -> list[Block]:
    """Who has measured what: hosts, or devices of them; none where a study has never noted it."""
    rows: list[list[Words]] = [
        [
            code(place.name),
            str(place.launches),
            str(place.candidates),
            str(place.blocks),
            str(place.pairs),
            str(place.failures),
            "; ".join(f"C = {level}: {rate:.1f}" for level, rate in place.baseline.items()) or NONE,
            datetime.fromtimestamp(place.last_at, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        ]
        for place in view.places
    ]
    if not rows:
        return []
    launches, blocks = sum(view.launches.values()), view.valid_blocks
    rest = launches - sum(p.launches for p in view.places), blocks - sum(p.blocks for p in view.places)
    if any(rest):
        rows.append(["imported, or of no place", str(rest[0]), NONE, str(rest[1]), NONE, NONE, NONE, NONE])
    if len(rows) > 1:
        rows.append([strong("together"), str(launches), NONE, str(blocks), NONE, NONE, NONE, NONE])
    head = ["Place", "Launches", "Candidates", "Valid blocks", "Pairs", "Failures", "Baseline, tok/s", "Last heard of"]
    text = (
        "A place is a host, or devices of one; both blocks of a pair are of one place, and a pair counts once at every "
        "level. Launches are all that were begun, those of the baseline, failed and interrupted ones too."
    )
    return [Heading(line("Where it was measured")), Paragraph(line(text)), table(head, rows, "lrrrrrll")]


def method(view: StudyView) -> Section:
    """How it was measured."""
    return section("Method", "How was it measured?", [Bullets(tuple(_method(view)))])


def _method(view: StudyView) -> Iterable[Line]:
    shares = ", ".join(f"{level} ({100 * view.level_weights[level]:.0f} %)" for level in view.levels)
    launches = ", ".join(f"{n} {state}" for state, n in view.launches.items()) or "none"
    started = datetime.fromtimestamp(view.created_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    yield line(
        f"Study begun {started}, {view.elapsed_s / 60:.1f} minutes with a server, {view.profile} profile, "
        f"objective {view.objective}."
    )
    yield line(
        "Load: prompts ",
        code(view.prompts),
        f", up to {view.max_tokens} tokens, temperature {view.temperature:g}; closed loop at concurrency {shares} "
        "(share in the objective).",
    )
    begun = sum(view.launches.values())
    yield line(
        f"Launches: {begun} begun ({launches}), of which {view.launches_used} count against the budget of "
        f"{view.budget_launches}; {view.valid_blocks} valid blocks."
    )
    if view.window_s is not None and view.warmup_s is not None:
        yield line(
            f"A block: {view.warmup_s:.1f} s of warm-up, then a window of {view.window_s:.1f} s at full concurrency "
            "with load kept on past its end (medians); tokens as the server's usage counts them."
        )
    rounds = [f"{count(finalists, 'finalist')} × {count(pairs, 'pair')}" for finalists, pairs in view.rounds]
    yield line(
        f"Confirmation on held-out prompts, each pair over fresh launches in mirrored order: "
        f"{'; '.join(rounds) or 'none yet'} ({view.pairs} pairs are planned per finalist and level in this profile)."
    )
