from __future__ import annotations

import time
from pathlib import Path

import pytest

from tuner.engines.simulated.blocks import BlockSource
from tuner.engines.simulated.noise import Noise
from tuner.errors import UsageError
from tuner.export.artefact import export_artefact
from tuner.export.choose import choose
from tuner.space import parse_space
from tuner.study.decide import recommendation
from tuner.study.in_memory import simulate
from tuner.study.progress import Silent
from tuner.study.session import Limits, current_fingerprint, open_or_create, read_space, run_study

SPACES = Path(__file__).parents[3] / "search_spaces"


def run(folder: Path, file: str, *overrides: str, launches: int = 14):  # type: ignore[no-untyped-def]
    space = read_space(str(SPACES / file), overrides)
    store = open_or_create(
        space,
        name="simulated",
        storage=f"sqlite:///{folder / 'study.db'}",
        limits=Limits(launches=launches),
        now=current_fingerprint(space),
    )
    try:
        return run_study(store, observer=Silent(), folder=folder)
    finally:
        store.close()


def test_a_study_of_another_engine_runs_simulated_and_is_marked_everywhere(tmp_path: Path) -> None:
    began = time.time()
    data = run(tmp_path, "quickstart.yaml", "engine.kind=simulated", "simulation.clock=virtual")
    assert data.state == "done"
    assert data.simulated
    assert data.elapsed_s > 10 * (time.time() - began)  # its hours are the machine's, not ours
    found = recommendation(data)
    assert found.simulated
    assert any("Simulated" in line for line in found.advice)
    chosen = choose(data)
    with pytest.raises(UsageError, match="--allow-simulated"):
        export_artefact(chosen.record, chosen.provenance, "shell", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    for path in export_artefact(chosen.record, chosen.provenance, "shell", tmp_path / "out", allow_simulated=True):
        assert "simulated" in path.read_text().lower()


def test_crash_regions_are_failures_of_the_candidate(tmp_path: Path) -> None:
    only = (
        "parameters.spec_version.choices=[v2]",
        "parameters.allreduce.choices=[custom, nccl_ring]",
        "sampler=random",
    )
    data = run(tmp_path, "pcie_blackwell.yaml", *only, launches=26)
    failed = [launch for launch in data.launches if launch.failure is not None]
    assert failed
    for launch in failed:
        assert launch.failure.kind == "startup_crash"
        settings = data.settings_of(launch.slot.candidate_id)
        assert settings["allreduce"] == "custom"
        assert settings["spec_version"] == "v2"


def test_the_simulation_section_changes_no_other_engine() -> None:
    plain = read_space(str(SPACES / "quickstart.yaml"))
    told = read_space(str(SPACES / "quickstart.yaml"), ("simulation.noise=2",))
    assert plain.fingerprint == told.fingerprint
    assert plain.args == told.args


SPACE = parse_space(
    """
name: seen
engine: {kind: simulated, model: any}
workload: {concurrency: [1, 8]}
baseline: {speculation: none}
parameters:
  speculation: {choices: [ngram]}
  num_steps: {low: 1, high: 6, when: speculation != 'none'}
""",
    source="seen.yaml",
)


def test_a_study_in_memory_plans_confirms_and_judges_like_any_other() -> None:
    def speed(settings, level):  # type: ignore[no-untyped-def]
        return 100.0 * level * (1.1 if settings.get("num_steps") == 3 else 1.0)

    data = simulate(SPACE, BlockSource(speed, Noise(), 1), 1)
    assert len(data.launches) <= SPACE.budget.launches
    assert [c.pairs for c in data.confirmations] == [8]
    found = recommendation(data)
    assert found.simulated
    assert found.overall.winner is not None
    assert found.overall.winner.settings["num_steps"] == 3
    assert found.overall.verdict is not None
    assert found.overall.verdict.low < 1.1 < found.overall.verdict.high
    again = simulate(SPACE, BlockSource(speed, Noise(), 1), 1)
    assert [b.block.tokens_per_s for b in again.blocks.values()] == [b.block.tokens_per_s for b in data.blocks.values()]
