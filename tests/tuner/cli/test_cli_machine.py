"""What a machine lacks or cannot do, found before a launch is paid for: the commands, with programs that stand in."""

from __future__ import annotations

import os
import re
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
    said = r"left out on these GPUs \(1 of \d+ candidates\): allreduce: custom serves more than two GPUs only where"
    assert re.search(said, checked.stdout)
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
    assert "NVIDIA GPU, compute capability 12.0, 512 of 97887 MiB" in found.stdout
    assert "not every GPU reads" not in found.stdout
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
    nvidia_smi(programs, PIX, gpus=2, peers="CNS")
    assert "not every GPU reads the others' memory" in tuner("doctor").stdout
    (programs / "gpus").write_text("0, NVIDIA GPU, 97887, 60000, 580.65\n1, NVIDIA GPU, 97887, 10, 580.65\n")
    assert "60000 of 97887 MiB of GPU 0 are held, unseen" in tuner("check", "space.yaml").stdout
    assert "cannot run here" not in tuner("check", single_gpu(tmp_path, ", devices: [1]")).stdout


def both(tuner: Tuner, tmp_path: Path, programs: Path) -> tuple[tuple[int, str], tuple[int, str]]:
    """Status and words of `check` and of `run` of space.yaml, neither of which launched anything."""
    checked, ran = tuner("check", "space.yaml"), tuner("run", "space.yaml")
    assert not (programs / "launched").exists()
    assert not (tmp_path / "studies").exists()
    return (checked.returncode, checked.stdout + checked.stderr), (ran.returncode, ran.stdout + ran.stderr)


def test_an_engine_that_is_missing_or_broken_is_the_machines_fault(
    tuner: Tuner, programs: Path, tmp_path: Path
) -> None:
    nvidia_smi(programs, PIX, gpus=2)
    single_gpu(tmp_path)
    (status, said), (ended, why) = both(tuner, tmp_path, programs)
    assert (status, ended) == (0, 3)
    assert "cannot run here: vllm is not here" in said
    assert "vllm is not here: 'vllm' is no program in PATH. Install it" in why
    write(
        programs / "vllm",
        "#!/bin/sh\necho 'ImportError: libcudart.so.13: cannot open shared object file' >&2\nexit 1\n",
    )
    (status, said), (ended, why) = both(tuner, tmp_path, programs)
    assert (status, ended) == (0, 3)
    assert "libcudart.so.13" in said
    assert "libcudart.so.13" in why


def test_a_version_that_is_too_old_for_a_flag_is_refused_with_the_nearest(
    tuner: Tuner, programs: Path, tmp_path: Path
) -> None:
    nvidia_smi(programs, PIX, gpus=2)
    vllm(programs, "0.11.0", without="--attention-backend")
    single_gpu(tmp_path)
    for status, said in both(tuner, tmp_path, programs):
        assert status == 2
        assert "--attention-backend: vllm 0.11.0 does not know it; did you mean '--" in said


def test_a_model_that_no_engine_could_load_and_a_draft_of_another_vocabulary_are_wrong_usage(
    tuner: Tuner, programs: Path, tmp_path: Path
) -> None:
    nvidia_smi(programs, PIX, gpus=2)
    vllm(programs)
    text = (tmp_path / single_gpu(tmp_path)).read_text().replace("Qwen/Qwen3-8B", "target")
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text('{"vocab_size": 151936}')
    (tmp_path / "space.yaml").write_text(text)
    for status, said in both(tuner, tmp_path, programs):
        assert (status, "names no architecture" in said) == (2, True)
    (tmp_path / "target" / "config.json").write_text('{"vocab_size": 151936, "model_type": "qwen3"}')
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text('{"vocab_size": 49152, "model_type": "llama"}')
    drafts = "[none, draft_model]}\n  draft_model: {choices: [draft], when: speculation != 'none'}"
    (tmp_path / "space.yaml").write_text(text.replace("[none, ngram]}", drafts))
    for status, said in both(tuner, tmp_path, programs):
        assert status == 2
        assert "'draft' has a vocabulary of 49152 tokens, and the model one of 151936: they must be the same" in said


def test_a_script_that_sets_an_environment_and_starts_the_engine_is_a_program(
    tuner: Tuner, programs: Path, tmp_path: Path
) -> None:
    nvidia_smi(programs, PIX, gpus=2)
    inner = engine(programs, "vllm", "0.32.0")
    inner.write_text(inner.read_text().replace("version: 0.32.0 (commit abc)", "0.32.0"))
    write(tmp_path / "serve.sh", '#!/bin/bash\nset -e\nexport OMP_NUM_THREADS=1\nexec vllm "$@"\n')
    text = (tmp_path / single_gpu(tmp_path)).read_text()
    (tmp_path / "space.yaml").write_text(text.replace("{attention_backend", "{program: ./serve.sh, attention_backend"))
    checked = tuner("check", "space.yaml")
    assert checked.returncode == 0, checked.stderr
    assert "cannot run here" not in checked.stdout
    (programs / "vllm.help").write_text((programs / "vllm.help").read_text().replace("--max-num-seqs", "--max-seqs"))
    write(tmp_path / "other.sh", '#!/bin/bash\nexec vllm "$@"\n')
    (tmp_path / "space.yaml").write_text(text.replace("{attention_backend", "{program: ./other.sh, attention_backend"))
    refused = tuner("check", "space.yaml")
    assert refused.returncode == 2
    assert "--max-num-seqs: vllm 0.32.0 does not know it" in refused.stderr
    write(tmp_path / "other.sh", "#!/bin/bash\nvllm serve 2> /dev/null\n")
    closed = tuner("run", "space.yaml")
    assert closed.returncode == 3
    assert 'must pass its arguments on (exec vllm "$@"), or engine.args.version must say which' in closed.stderr


def docker(programs: Path, digest: str = "sha256:1") -> None:
    """A docker with one image, in which a vLLM shows its help; what was run stands in `runs`."""
    inspected = f'[{{"Id": "{digest}", "RepoDigests": ["vllm/vllm-openai@{digest}"], "Config": {{"Env": []}}}}]'
    (programs / "inspected").write_text(inspected)
    write(
        programs / "docker",
        f"""#!/bin/sh
case "$1 $2" in
  "version "*) echo 27.1;;
  "image inspect") [ "$3" = vllm/vllm-openai:v0.32.0 ] && cat {programs}/inspected || exit 1;;
  "run "*) echo "$@" >> {programs}/runs; cat {programs}/vllm.help;;
  *) exit 1;;
esac
""",
    )


def test_flags_are_held_against_the_engine_in_an_image_and_it_is_asked_once_for_each_digest(
    tuner: Tuner, programs: Path, tmp_path: Path
) -> None:
    nvidia_smi(programs, PIX, gpus=2)
    engine(programs, "vllm", "0.32.0").unlink()
    docker(programs)
    section = ", container: {image: 'vllm/vllm-openai:v0.32.0', gpus: all, run_args: [--entrypoint, '']}"
    single_gpu(tmp_path, section)
    for _ in range(2):
        checked = tuner("check", "space.yaml")
        assert checked.returncode == 0, checked.stderr
        assert "not held against" not in checked.stdout
    (run,) = (programs / "runs").read_text().splitlines()
    assert run.startswith("run --rm --pull=never --network none --cidfile /")
    assert run.endswith("--gpus all --entrypoint  vllm/vllm-openai@sha256:1 vllm serve --help=all")
    shown = (programs / "vllm.help").read_text()
    (programs / "vllm.help").write_text(shown.replace("--max-num-seqs", "--max-num-seqz"))
    docker(programs, "sha256:2")
    refused = tuner("check", "space.yaml")
    assert refused.returncode == 2
    assert (
        "--max-num-seqs: the vllm of vllm/vllm-openai:v0.32.0 does not know it; did you mean "
        "'--max-num-seqz'?" in refused.stderr
    )
    (programs / "vllm.help").write_text("vllm: error: unrecognized arguments: vllm serve")
    docker(programs, "sha256:3")
    unasked = tuner("check", "space.yaml")
    assert unasked.returncode == 0
    assert "the flags are not held against the engine in the image: vllm is broken: 'docker run" in unasked.stdout
    assert "unrecognized arguments: vllm serve" in unasked.stdout


def test_an_image_that_is_not_here_leaves_its_flags_unasked(tuner: Tuner, programs: Path, tmp_path: Path) -> None:
    nvidia_smi(programs, PIX, gpus=2)
    docker(programs)
    single_gpu(tmp_path, ", container: {image: 'vllm/vllm-openai:v0.1'}")
    checked, ran = tuner("check", "space.yaml"), tuner("run", "space.yaml")
    assert (checked.returncode, ran.returncode) == (3, 3)
    assert "docker has no image 'vllm/vllm-openai:v0.1'" in checked.stderr + ran.stderr
    assert not (programs / "runs").exists()
