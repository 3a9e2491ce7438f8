"""What a machine lacks or cannot do, found before a launch is paid for: the commands, with programs that stand in."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tuner.engines.test_fabric import NVSWITCH, PIX, ROOT, reads
from tuner.engines.versions import known

Tuner = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder of programs that comes first in PATH."""
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


@pytest.fixture
def tuner(tmp_path: Path, programs: Path) -> Tuner:
    """Runs the command in an empty folder, on a machine that has no engine and remembers none."""
    root = Path(__file__).parents[3]
    env = {**os.environ, "PYTHONPATH": str(root), "PATH": f"{programs}:/usr/bin:/bin"}
    env |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tuner", *arguments], capture_output=True, text=True, cwd=tmp_path, env=env
        )

    return run


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def nvidia_smi(
    programs: Path, topology: str, *, gpus: int, capability: str = "12.0", peers: str = "OK", busy: str = ""
) -> None:
    """A driver that answers as the real one. `busy` is what computes on the GPUs, as `pid, MiB` lines."""
    (programs / "topology").write_text(topology)
    (programs / "peers").write_text(reads(gpus, peers))
    (programs / "busy").write_text(busy)
    (programs / "gpus").write_text("".join(f"{i}, NVIDIA GPU, 97887, 512, 580.65\n" for i in range(gpus)))
    (programs / "names").write_text("NVIDIA GPU, 97887 MiB, 580.65\n" * gpus)
    (programs / "capabilities").write_text("".join(f"{i}, {capability}\n" for i in range(gpus)))
    write(
        programs / "nvidia-smi",
        f"""#!/bin/sh
cd {programs}
case "$*" in
  "topo -m") cat topology;;
  "topo -p2p r") cat peers;;
  --query-compute-apps*) cat busy;;
  --query-gpu=index,compute_cap*) cat capabilities;;
  --query-gpu=index,name*) cat gpus;;
  --query-gpu=name*) cat names;;
  *) echo "unknown: $*" >&2; exit 6;;
esac
""",
    )


def engine(programs: Path, kind: str, version: str, without: str = "") -> Path:
    """An engine in PATH that tells its version and its flags, and cannot serve anything."""
    flags = "".join(f"  {flag} N    text\n" for flag in next(iter(known(kind).values())).flags if flag != without)
    name = {"llama_server": "llama-server"}.get(kind, kind)
    (programs / f"{name}.help").write_text(flags)
    return write(
        programs / name,
        f"""#!{sys.executable}
import pathlib, sys
folder = pathlib.Path({str(programs)!r})
if "--version" in sys.argv:
    print("version: {version} (commit abc)")
elif any(word.startswith("--help") for word in sys.argv):
    print((folder / "{name}.help").read_text())
else:
    (folder / "launched").touch()
    sys.exit(1)
""",
    )


SPACE = """
name: paths
engine:
  kind: KIND
  model: Qwen/Qwen3-8B
  args: {tp: TP, attention_backend: BACKEND, version: VERSION MORE}
workload: {concurrency: [1]}
baseline: {speculation: none, allreduce: BASE}
parameters:
  allreduce: {choices: [nccl, custom, symm_mem, flashinfer_pcie_ipc]}
  env.NCCL_PROTO: {choices: [unset, LL, LL128], when: allreduce == 'nccl'}
  env.NCCL_P2P_LEVEL: {choices: [unset, PHB, SYS], when: allreduce == 'nccl'}
budget: {launches: 12}
"""
ARGS = {
    "vllm": {"BACKEND": "FLASHINFER", "VERSION": "'0.32.0'", "MORE": ""},
    "sglang": {"BACKEND": "flashinfer", "VERSION": "'0.5.23'", "MORE": ", page_size: 1"},
}


def space(folder: Path, kind: str, tp: int, base: str = "nccl") -> str:
    text = SPACE.replace("KIND", kind).replace("TP", str(tp)).replace("BASE", base)
    for name, value in ARGS[kind].items():
        text = text.replace(name, value)
    (folder / "space.yaml").write_text(text)
    return "space.yaml"


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_paths_that_the_topology_makes_impossible_are_left_out_with_the_reason(
    kind: str, tuner: Tuner, programs: Path, tmp_path: Path
) -> None:
    nvidia_smi(programs, ROOT, gpus=8)
    checked = tuner("check", space(tmp_path, kind, 8))
    assert checked.returncode == 0, checked.stderr
    assert (
        "left out on these GPUs (1 candidates): allreduce: custom serves more than two GPUs only where"
        in checked.stdout
    )
    assert "needs NVLink switches (multicast), which these GPUs do not have" in checked.stdout
    assert "LL128 where it is not supported corrupts data" in checked.stdout
    planned = tuner("plan", "space.yaml")
    assert "1 ruled out (engine): allreduce: custom serves more than two GPUs" in planned.stdout


def test_a_machine_whose_gpus_are_linked_leaves_nothing_out(tuner: Tuner, programs: Path, tmp_path: Path) -> None:
    nvidia_smi(programs, NVSWITCH, gpus=8, capability="9.0")
    assert "left out" not in tuner("check", space(tmp_path, "vllm", 8)).stdout
    nvidia_smi(programs, PIX, gpus=2, capability="8.9")
    checked = tuner("check", space(tmp_path, "vllm", 2)).stdout
    assert "custom" not in checked
    assert "env.NCCL_P2P_LEVEL: PHB and SYS are one here: no two GPUs are beyond PIX" in checked


def test_a_baseline_that_these_gpus_cannot_run_ends_run_with_3_and_check_says_so(
    tuner: Tuner, programs: Path, tmp_path: Path
) -> None:
    nvidia_smi(programs, ROOT, gpus=8)
    checked = tuner("check", space(tmp_path, "sglang", 8, base="custom"))
    assert checked.returncode == 0
    assert "cannot run here: the baseline: allreduce: custom serves more than two" in checked.stdout
    ran = tuner("run", "space.yaml")
    assert ran.returncode == 3
    assert "the baseline: allreduce: custom" in ran.stderr
    assert not (tmp_path / "studies").exists()
