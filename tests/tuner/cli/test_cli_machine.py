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


def single_gpu(folder: Path, more: str = "") -> str:
    (folder / "space.yaml").write_text(
        f"""
name: single
engine: {{kind: vllm, model: Qwen/Qwen3-8B, args: {{attention_backend: FLASHINFER, memory_fraction: 0.9}}{more}}}
workload: {{concurrency: [1]}}
baseline: {{speculation: none}}
parameters:
  speculation: {{choices: [none, ngram]}}
  num_steps: {{low: 1, high: 2, when: speculation != 'none'}}
"""
    )
    return "space.yaml"


def vllm(programs: Path, version: str = "0.32.0", without: str = "") -> None:
    """A vLLM of this version: a program beside the interpreter of an environment that has its distribution."""
    site = programs / "site" / f"vllm-{version}.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    write(programs / "python3", f'#!/bin/sh\nPYTHONPATH={programs}/site exec {sys.executable} "$@"\n')
    text = engine(programs, "vllm", version, without).read_text()
    write(programs / "vllm", text.replace(sys.executable, f"{programs}/python3", 1))


def test_a_gpu_that_is_in_use_is_found_before_a_launch(tuner: Tuner, programs: Path, tmp_path: Path) -> None:
    vllm(programs)
    nvidia_smi(programs, PIX, gpus=2, busy="4711, 69000\n")
    ran = tuner("run", single_gpu(tmp_path))
    assert ran.returncode == 3, ran.stdout
    assert "GPU 0: already in use (process 4711 holds 69000 MiB); wait for it, end it, or name other GPUs" in ran.stderr
    checked = tuner("check", "space.yaml")
    assert checked.returncode == 0, "the file is right"
    assert "cannot run here: GPU 0: already in use" in checked.stdout
    found = tuner("doctor")
    assert found.returncode == 3
    assert "a GPU is in use: process 4711 holds 69000 MiB" in found.stdout.replace("\n", " ")
    assert not (programs / "launched").exists()
    assert not (tmp_path / "studies").exists()


def test_a_context_beside_is_no_use_and_a_gpu_held_from_outside_a_container_is(
    tuner: Tuner, programs: Path, tmp_path: Path
) -> None:
    vllm(programs)
    nvidia_smi(programs, PIX, gpus=2, busy="4711, 120\n")
    checked = tuner("check", single_gpu(tmp_path))
    assert checked.returncode == 0, checked.stderr
    assert "cannot run here" not in checked.stdout
    nvidia_smi(programs, PIX, gpus=2)
    (programs / "gpus").write_text("0, NVIDIA GPU, 97887, 60000, 580.65\n1, NVIDIA GPU, 97887, 10, 580.65\n")
    assert "60000 of 97887 MiB of GPU 0 are held, unseen" in tuner("check", "space.yaml").stdout
    assert "cannot run here" not in tuner("check", single_gpu(tmp_path, ", devices: [1]")).stdout
