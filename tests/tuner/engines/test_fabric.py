"""Machines of the usual kinds, as `nvidia-smi` draws them: which all-reduce paths and settings of NCCL are left out."""

from __future__ import annotations

from typing import Any

import pytest

from tuner.engines.allreduce import FACTS, Fabric, doubt, fabric
from tuner.engines.base import get_engine, on_gpus
from tuner.engines.nccl import impossible, same_levels
from tuner.launch.gpu import parse_capabilities, parse_topology


def drawn(ways: list[str], *, nics: int = 0) -> str:
    """What `nvidia-smi topo -m` prints for rows of cells."""
    count = len(ways)
    names = [f"GPU{i}" for i in range(count)] + [f"NIC{i}" for i in range(nics)]
    heading = "\t\x1b[4m" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m"
    ends = "\tSYS" * nics + "\t0-31,64-95\t0\t\tN/A"
    rows = [f"GPU{i}\t" + "\t".join(cell.center(4) for cell in row.split()) + ends for i, row in enumerate(ways)]
    nic = [f"NIC{i}\t" + "\t".join(["SYS"] * count) + "\t X \t\t" for i in range(nics)]
    legend = ["", "Legend:", "", "  X    = Self", "  SYS  = Connection traversing PCIe as well as the SMP interconnect"]
    return "\n".join([heading, *rows, *nic, *legend])


def reads(count: int, cell: str) -> str:
    """What `nvidia-smi topo -p2p r` prints where every pair is alike."""
    heading = " \t" + "\t".join(f"GPU{i}" for i in range(count)) + "\t"
    rows = [f" GPU{i}\t" + "\t".join("X" if i == j else cell for j in range(count)) + "\t" for i in range(count)]
    return "\n".join([heading, *rows, "", "Legend:", "", "  X    = Self", "  OK   = Status Ok"])


NVSWITCH = drawn([" ".join("X" if i == j else "NV18" for j in range(8)) for i in range(8)], nics=2)
PAIRS = drawn(["X NV4 SYS SYS", "NV4 X SYS SYS", "SYS SYS X NV4", "SYS SYS NV4 X"])
ROOT = drawn(
    [
        "X PHB NODE NODE SYS SYS SYS SYS",
        "PHB X NODE NODE SYS SYS SYS SYS",
        "NODE NODE X PHB SYS SYS SYS SYS",
        "NODE NODE PHB X SYS SYS SYS SYS",
        "SYS SYS SYS SYS X PHB NODE NODE",
        "SYS SYS SYS SYS PHB X NODE NODE",
        "SYS SYS SYS SYS NODE NODE X PHB",
        "SYS SYS SYS SYS NODE NODE PHB X",
    ]
)
PIX = drawn(["X PIX", "PIX X"])
BRIDGE = drawn(["X NV12", "NV12 X"])


def machine(text: str, peers: str = "", capability: float = 9.0, devices: tuple[str, ...] = ()) -> Fabric | None:
    rows = parse_topology(text)
    return fabric(rows, peers.splitlines(), dict.fromkeys(range(8), capability), devices)


def facts(text: str, tp: int, **given: Any) -> dict[str, Any]:
    found = machine(text, **given)
    return {name.removeprefix("gpus."): value for name, value in found.facts(tp).items()} if found else {}


def test_what_is_known_of_the_usual_machines() -> None:
    ok = reads(8, "OK")
    assert facts(NVSWITCH, 8, peers=ok) == {
        "linked": True, "any_link": True, "peers": True, "capability": 9.0, "switched": True,
    }  # fmt: skip
    pairs = facts(PAIRS, 4, peers=reads(4, "OK"), capability=8.0)
    assert (pairs["linked"], pairs["any_link"], pairs["switched"]) == (False, True, False)
    assert facts(PAIRS, 2, capability=8.0)["linked"], "the first two are a pair"
    assert facts(PAIRS, 2, devices=("1", "2"))["linked"] is False
    assert facts(ROOT, 8, peers=reads(8, "CNS"), capability=12.0) == {
        "linked": False, "any_link": False, "peers": False, "capability": 12.0, "switched": False,
    }  # fmt: skip
    assert "switched" not in facts(BRIDGE, 2), "a bridge and two GPUs of a switch look alike"
    assert "peers" not in facts(PIX, 2), "a driver that does not tell"
    assert "peers" not in facts(PIX, 2, peers=reads(2, "U"))


def test_nothing_is_known_of_fewer_gpus_than_are_wanted_or_of_ids() -> None:
    assert facts(PIX, 4) == facts(PIX, 1) == {}
    assert machine(drawn(["X"])) is None
    assert machine("") is None
    assert machine(PIX, devices=("GPU-1f0c", "GPU-2a3b")) is None
    assert machine(PIX, devices=("0", "7")) is None
    assert machine(PIX, devices=("0",)) is None


def left_out(kind: str, text: str, tp: int, **given: Any) -> set[str]:
    """The paths that an engine refuses on these GPUs and does not refuse without knowing them."""
    args: dict[str, dict[str, Any]] = {
        "sglang": {"attention_backend": "flashinfer", "page_size": 1, "version": "0.5.23"},
        "vllm": {"attention_backend": "FLASH_ATTN", "version": "0.32.0"},
        "bundled": {"device": "gpu"},
    }
    found = set()
    for path in get_engine(kind).settings["allreduce"].choices:
        asked = {**args[kind], "tp": tp}, {"speculation": "none", "allreduce": path}
        if not get_engine(kind).problems(*asked) and on_gpus(get_engine(kind), machine(text, **given)).problems(*asked):
            found.add(str(path))
    return found


@pytest.mark.parametrize("kind", ["sglang", "vllm", "bundled"])
def test_eight_gpus_on_a_switch_leave_nothing_out(kind: str) -> None:
    assert left_out(kind, NVSWITCH, 8, peers=reads(8, "OK")) == set()


def test_what_links_switches_and_peers_are_needed_for_is_left_out_where_they_are_not() -> None:
    blackwell = {"peers": reads(8, "OK"), "capability": 12.0}
    assert left_out("sglang", ROOT, 8, **blackwell) == {"custom", "symm_mem", "nvls", "flashinfer_fusion"}
    assert left_out("vllm", ROOT, 8, **blackwell) == {"custom", "symm_mem", "flashinfer_fusion"}
    assert left_out("bundled", ROOT, 8, **blackwell) == set(), "its own are made for PCIe peers"
    ampere = {"peers": reads(4, "OK"), "capability": 8.0}
    assert left_out("sglang", PAIRS, 4, **ampere) == {"custom", "symm_mem", "nvls", "flashinfer_fusion"}
    assert left_out("vllm", PAIRS, 2, **ampere) == {"symm_mem", "flashinfer_fusion"}, "a pair has its link"
    assert left_out("bundled", PAIRS, 4, **ampere) == {"flashinfer_fusion"}


def test_two_gpus_on_pcie_have_a_custom_path_only_where_each_reads_the_other() -> None:
    for kind in ("sglang", "vllm"):
        assert "custom" not in left_out(kind, PIX, 2, peers=reads(2, "OK"))
        assert "custom" not in left_out(kind, PIX, 2), "what is not told leaves nothing out"
        assert "custom" in left_out(kind, PIX, 2, peers=reads(2, "CNS"))
    assert left_out("bundled", PIX, 2, peers=reads(2, "CNS")) == {"custom", "symm_mem", "nccl_symm", "mscclpp"}


def test_the_one_fast_path_of_pcie_is_never_left_out_by_topology() -> None:
    for text, tp in ((ROOT, 8), (PIX, 2), (PAIRS, 4), (NVSWITCH, 8)):
        for kind in ("sglang", "vllm", "bundled"):
            assert not {"flashinfer_pcie_ipc", "nccl", "auto"} & left_out(kind, text, tp, peers=reads(8, "CNS"))


def test_a_reason_names_what_is_missing() -> None:
    engine = on_gpus(get_engine("sglang"), machine(ROOT))
    args = {"attention_backend": "flashinfer", "page_size": 1, "version": "0.5.23", "tp": 8}
    (said,) = engine.problems(args, {"speculation": "none", "allreduce": "custom"})
    assert said.startswith("allreduce: custom serves more than two GPUs only where NVLink joins every two")
    launch = engine.record(
        model="Qwen/Qwen3-8B", args=args, env={}, settings={"allreduce": "custom"}, host="127.0.0.1", port=1
    )
    assert launch.argv, "what was measured before, or is meant for elsewhere, can still be written down"


def test_what_is_merely_unpromising_is_a_doubt() -> None:
    pcie, switch = machine(ROOT, peers=reads(8, "CNS")), machine(NVSWITCH, peers=reads(8, "OK"))
    assert pcie is not None
    assert switch is not None
    assert "do not read each other's memory" in str(doubt("flashinfer_pcie_ipc", pcie.facts(8)))
    assert "NVLink joins these GPUs" in str(doubt("flashinfer_pcie_ipc", switch.facts(8)))
    assert doubt("flashinfer_pcie_ipc", facts_of(ROOT, 8)) is None
    assert "are on PCIe" in str(doubt("mscclpp", facts_of(ROOT, 8)))
    assert doubt("nccl", pcie.facts(8)) is doubt("mscclpp", switch.facts(8)) is doubt("custom", {}) is None


def facts_of(text: str, tp: int) -> dict[str, Any]:
    found = machine(text)
    return found.facts(tp) if found else {}


def test_settings_of_nccl_that_these_gpus_could_not_do_are_left_out() -> None:
    pcie, switch = facts_of(ROOT, 8), facts_of(NVSWITCH, 8)
    asked = {
        "NCCL_NVLS_ENABLE": "1",
        "NCCL_PROTO": "LL128",
        "NCCL_P2P_LEVEL": "NVL",
        "NCCL_ALGO": "allreduce:nvls",
    }
    assert len(impossible(asked, pcie)) == 4
    assert impossible(asked, switch) == impossible(asked, {}) == []
    fine = {"NCCL_NVLS_ENABLE": "0", "NCCL_PROTO": "^LL128", "NCCL_P2P_LEVEL": "SYS", "NCCL_MAX_CTAS": None}
    assert impossible(fine, pcie) == []
    assert "corrupts data" in impossible({"NCCL_PROTO": "LL,LL128"}, pcie)[0]


def test_levels_beyond_the_farthest_two_gpus_are_one() -> None:
    root, pix, pairs = machine(ROOT), machine(PIX), machine(PAIRS)
    assert root is not None
    assert pix is not None
    assert pairs is not None
    assert (root.farthest(8), root.farthest(4), root.farthest(2), pairs.farthest(2)) == ("SYS", "PHB", "PHB", "NVL")
    levels = ["unset", "PIX", "PHB", "SYS"]
    assert same_levels(levels, pix.farthest(2)) == ["PIX", "PHB", "SYS"]
    assert same_levels(levels, root.farthest(4)) == ["PHB", "SYS"]
    assert same_levels(levels, root.farthest(8)) == same_levels(levels, None) == []


def test_rules_ask_nothing_of_gpus_but_what_is_told_of_them() -> None:
    assert set(FACTS) >= set(facts_of(NVSWITCH, 8))


def test_compute_capabilities_are_read_where_the_driver_tells() -> None:
    assert parse_capabilities("0, 9.0\n1, 12.0\n") == {0: 9.0, 1: 12.0}
    assert parse_capabilities('Field "compute_cap" is not a valid field to query.\n') == {}
