"""What `nvidia-smi` answers, read without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.launch import gpu

QUERY = """0, NVIDIA H200, 143771, 512, 560.35.05
1, NVIDIA RTX PRO 6000, Blackwell Server Edition, 97887, [N/A], 560.35.05
"""
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tPHB\tSYS\t0-31\t0\t\tN/A\n"
    "GPU1\tPHB\t X \tSYS\t0-31\t0\t\tN/A\n"
    "NIC0\tSYS\tSYS\t X \n"
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe\n"
)


def test_gpus_with_a_comma_in_the_name_and_figures_that_are_not_told() -> None:
    first, second = gpu.parse_gpus(QUERY)
    assert first == gpu.Gpu(0, "NVIDIA H200", 143771, 512, "560.35.05")
    assert second.name == "NVIDIA RTX PRO 6000, Blackwell Server Edition"
    assert second.used_mib is None
    assert gpu.parse_gpus("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n") == []


def test_processes_on_a_gpu() -> None:
    assert gpu.parse_processes("4711, 69000\n4712, [N/A]\n\n") == [
        gpu.GpuProcess(4711, 69000),
        gpu.GpuProcess(4712, None),
    ]


def test_the_matrix_of_connections_without_its_legend() -> None:
    heading, *rows = gpu.parse_topology(TOPOLOGY)
    assert heading.split()[:2] == ["GPU0", "GPU1"]
    assert [row.split()[0] for row in rows] == ["GPU0", "GPU1"]
    assert gpu.parse_topology("") == []


def test_memory_is_back_up_to_a_slack_and_on_every_gpu() -> None:
    before = {0: 500, 1: 500}
    assert gpu.is_back(before, {0: 100, 1: 700})
    assert not gpu.is_back(before, {0: 500, 1: 70_000})


def test_release_of_memory_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f"#!/bin/sh\nn=$(cat {tmp_path}/n 2>/dev/null || echo 3)\n"
        f"echo 0, GPU, 1000, $((n * 200)), 1\n[ $n -gt 0 ] && echo $((n - 1)) > {tmp_path}/n\nexit 0\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert gpu.memory_used() == {0: 600}
    assert gpu.wait_for({0: 0}, timeout_s=5, poll_s=0.01) is True
    (tmp_path / "n").write_text("9")
    program.write_text("#!/bin/sh\necho 0, GPU, 1000, 900, 1\n")
    assert gpu.wait_for({0: 0}, timeout_s=0.1, poll_s=0.01) is False
    program.write_text("#!/bin/sh\nexit 9\n")
    assert gpu.wait_for({0: 0}, timeout_s=0.1) is None
    assert gpu.wait_for(None, timeout_s=0.1) is None
