"""Before the first launch: an engine, flags and hardware that are not here cost no start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tuner.engines.versions import known
from tuner.errors import EnvironmentBroken
from tuner.launch.gpu import GpuProcess
from tuner.space.load import find_space, shipped
from tuner.study.preflight import kept_secret, preflight, require, require_free
from tuner.study.session import read_space

SERVED = ("vllm_cpu", "vllm_single_gpu", "sglang_single_gpu", "llama_server", "pcie_blackwell_sglang")


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine in PATH, no GPU, and nothing remembered of either."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def tuner(*arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[3]
    return subprocess.run(
        [sys.executable, "-m", "tuner", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )


@pytest.mark.parametrize("name", SERVED)
def test_a_space_that_ships_is_valid_on_a_machine_that_has_nothing_for_it(name: str) -> None:
    assert f"{name}.yaml" in shipped()
    space = read_space(f"{name}.yaml")
    found = preflight(space)
    assert found.refused == ()
    assert any("engine.args.program" in sentence for sentence in found.missing)
    gpus = [sentence for sentence in found.missing if "needed (tp)" in sentence]
    assert bool(gpus) == (name not in ("vllm_cpu", "llama_server"))


def test_check_says_what_is_missing_and_passes_and_run_ends_with_3_and_makes_no_study(tmp_path: Path) -> None:
    checked = tuner("check", "sglang_single_gpu.yaml")
    assert (checked.returncode, "cannot run here: 1 GPU is needed" in checked.stdout) == (0, True), checked.stderr
    storage = f"sqlite:///{tmp_path}/study.db"
    ran = tuner("run", "sglang_single_gpu.yaml", "--storage", storage)
    assert ran.returncode == 3
    assert "sglang is not here" in ran.stderr
    assert "engine.kind=simulated" in ran.stderr
    assert not (tmp_path / "study.db").exists()


def llama(folder: Path, without: str) -> str:
    """A llama-server that does not know one flag."""
    (data,) = known("llama_server").values()
    (folder / "help").write_text("\n".join(f"{flag} N    text" for flag in data.flags if flag != without))
    path = folder / "llama-server"
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "version: 0.5.0 (commit abc)" && exit\ncat {folder}/help\n'
    )
    path.chmod(0o755)
    return str(path)


def test_a_flag_that_the_installed_engine_does_not_know_ends_check_with_2(tmp_path: Path) -> None:
    good = tuner("check", "llama_server.yaml", "--set", f"engine.args.program={llama(tmp_path, '--nothing')}")
    assert good.returncode == 0, good.stderr
    assert "cannot run here" not in good.stdout
    bad = tuner("check", "llama_server.yaml", "--set", f"engine.args.program={llama(tmp_path, '--cache-ram')}")
    assert bad.returncode == 0, "the flags of a program are asked for once per version"
    (tmp_path / "later").mkdir()
    bad = tuner(
        "check", "llama_server.yaml", "--set", f"engine.args.program={llama(tmp_path / 'later', '--cache-ram')}"
    )
    assert bad.returncode == 2
    assert "--cache-ram: llama_server 0.5.0+abc does not know it; did you mean" in bad.stderr


def test_a_flag_of_one_candidate_alone_is_found_as_well(tmp_path: Path) -> None:
    program = llama(tmp_path, "--spec-ngram-simple-size-m")
    found = preflight(read_space("llama_server.yaml", (f"engine.args.program={program}",)))
    assert [sentence.partition(":")[0] for sentence in found.refused] == ["--spec-ngram-simple-size-m"]


SECRET = """
name: told
engine:
  kind: command
  model: tiny
  args: {command: [sh, -c, "sleep 1", --port, "{port}", --api-key, s3cr3t, "{depth}"], ready_path: /health}
workload: {concurrency: [1]}
baseline: {depth: 1}
parameters: {depth: {low: 1, high: 5}}
"""


def test_a_secret_among_the_arguments_is_doubted_and_not_repeated(tmp_path: Path) -> None:
    (tmp_path / "told.yaml").write_text(SECRET)
    checked = tuner("check", str(tmp_path / "told.yaml"))
    assert checked.returncode == 0, checked.stderr
    assert "note: engine.args hold what looks like a secret" in checked.stdout
    assert "s3cr3t" not in checked.stdout + checked.stderr
    assert kept_secret(read_space(str(tmp_path / "told.yaml"))) is not None
    assert [name for name in shipped() if kept_secret(read_space(name))] == []


def test_engines_that_come_with_the_tuner_are_not_asked() -> None:
    assert require(read_space("quickstart.yaml")) == preflight(read_space("quickstart.yaml"))


@pytest.mark.parametrize(
    ("drafter", "draft", "said"),
    [
        ("eagle3", {"hidden_size": 64, "vocab_size": 100, "draft_vocab_size": 50}, None),
        ("eagle3", {"hidden_size": 32, "vocab_size": 100}, "hidden states of 32 numbers, and the model has 64"),
        ("eagle3", {"hidden_size": 64, "draft_vocab_size": 101}, "proposes 101 tokens"),
        ("draft_model", {"hidden_size": 8, "vocab_size": 100}, None),
        ("draft_model", {"vocab_size": 99}, "a vocabulary of 99 tokens, and the model one of 100"),
        ("draft_model", None, "no config.json"),
    ],
)
def test_a_draft_that_does_not_fit_is_found_before_a_launch(
    drafter: str, draft: dict[str, int] | None, said: str | None, tmp_path: Path
) -> None:
    for name, config in (("model", {"hidden_size": 64, "vocab_size": 100}), ("draft", draft)):
        (tmp_path / name).mkdir()
        if config is not None:
            (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    text = find_space("vllm_single_gpu.yaml").read_text()
    if drafter == "draft_model":
        text = text.replace("draft_head:", "draft_model:").replace("'eagle3'", "'draft_model'")
    file = tmp_path / "space.yaml"
    file.write_text(text.replace("AngelSlim/Qwen3-8B_eagle3", str(tmp_path / "draft")))
    changes = (f"engine.model={tmp_path / 'model'}", f"parameters.speculation.choices=[ngram, {drafter}]")
    refused = preflight(read_space(str(file), changes)).refused
    assert (refused == ()) == (said is None)
    assert said is None or said in refused[0]


def test_a_draft_that_is_not_there_is_found_before_a_launch_unless_a_container_has_it(tmp_path: Path) -> None:
    text = find_space("sglang_single_gpu.yaml").read_text(encoding="utf-8")
    file = tmp_path / "s.yaml"
    file.write_text(text.replace("AngelSlim/Qwen3-8B_eagle3", "/no/such/head"), encoding="utf-8")
    (refused,) = preflight(read_space(str(file))).refused
    assert refused.startswith("draft_head: '/no/such/head' does not exist; valid: ")
    assert preflight(read_space(str(file), ("engine.container.image=lmsysorg/sglang:v0.5.23",))).refused == ()


def test_who_holds_a_gpu_is_told_from_the_server_of_a_study_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def strangers(_devices: object, *, but_ours: bool = False) -> list[GpuProcess]:
        return [GpuProcess(11, 9000)] if but_ours else [GpuProcess(11, 9000), GpuProcess(12, 70000)]

    monkeypatch.setattr("tuner.launch.strangers.strangers", strangers)
    with pytest.raises(EnvironmentBroken) as caught:
        require_free(read_space("vllm_single_gpu.yaml"))
    assert "process 11 holds 9000 MiB, process 12, a server of a study at work, holds 70000 MiB" in str(caught.value)
