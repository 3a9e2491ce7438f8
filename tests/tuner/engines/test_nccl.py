"""NCCL's own settings: searched where NCCL adds up what a decode step computed, and by values that it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tuner.engines.nccl import contradictory, value_problem
from tuner.space import SpaceProblems
from tuner.study.session import read_space

ENGINES = {
    "sglang": "model: Qwen/Qwen3-8B, args: {tp: 4, attention_backend: flashinfer, page_size: 1",
    "vllm": "model: Qwen/Qwen3-8B, args: {tp: 4, attention_backend: FLASH_ATTN",
    "bundled": "model: smollm2-135m, args: {tp: 4, device: gpu",
}


def wrong(tmp_path: Path, kind: str, nccl: str, *, baseline: str = "allreduce: nccl", args: str = "") -> str:
    """What is wrong with a space that searches a setting of NCCL; "" where nothing is."""
    search = "" if "allreduce" in args else "  allreduce: {choices: [nccl, nccl_symm, custom]}\n"
    file = tmp_path / "space.yaml"
    file.write_text(
        f"name: nccl\nengine: {{kind: {kind}, {ENGINES[kind]}{args}}}}}\nworkload: {{concurrency: [1]}}\n"
        f"baseline: {{{baseline}}}\nparameters:\n  max_running_requests: {{choices: [64, 128]}}\n{search}  {nccl}\n"
    )
    try:
        read_space(str(file))
    except SpaceProblems as problems:
        return "; ".join(f"{one.where}: {one.message}" for one in problems.problems)
    return ""


@pytest.mark.parametrize("kind", ENGINES)
def test_a_setting_of_nccl_beside_a_path_that_does_not_go_by_it_is_refused_with_the_condition_to_write(
    kind: str, tmp_path: Path
) -> None:
    proto = "env.NCCL_PROTO: {choices: [unset, LL, Simple]"
    found = wrong(tmp_path, kind, proto + "}")
    assert found.startswith("parameters.env.NCCL_PROTO: with allreduce 'custom' the sums of a decode step do not go")
    assert "when: allreduce == 'nccl'" in found
    assert wrong(tmp_path, kind, proto + ", when: allreduce == 'nccl'}") == ""
    assert wrong(tmp_path, kind, proto + ", when: allreduce != 'custom'}") == "", "these all are NCCL's"
    assert wrong(tmp_path, kind, "env.NCCL_DEBUG: {choices: [WARN, INFO]}") == "", "it changes no sum"
    fixed = wrong(tmp_path, kind, proto + "}", baseline="max_running_requests: 64", args=", allreduce: nccl")
    assert fixed == "", "fixed for all"


@pytest.mark.parametrize("kind", ENGINES)
def test_a_path_that_is_left_to_the_engine_may_not_be_nccls(kind: str, tmp_path: Path) -> None:
    found = wrong(
        tmp_path,
        kind,
        "env.NCCL_MAX_CTAS: {choices: [1, 4]}",
        baseline="max_running_requests: 64",
        args=", allreduce: auto",
    )
    assert found.startswith("parameters.env.NCCL_MAX_CTAS: allreduce is left to the engine")


def test_what_a_path_sets_itself_is_not_searched_beside_it(tmp_path: Path) -> None:
    found = wrong(tmp_path, "sglang", "env.NCCL_CUMEM_ENABLE: {choices: [unset, 0, 1], when: allreduce != 'custom'}")
    assert "allreduce 'nccl_symm' sets it itself" in found
    found = wrong(tmp_path, "sglang", "", baseline="allreduce: custom, env.NCCL_PROTO: LL")
    assert found.startswith("baseline.env.NCCL_PROTO: with allreduce 'custom'")
    assert "engine.env" in found


@pytest.mark.parametrize(
    ("variable", "good", "bad"),
    [
        ("P2P_LEVEL", ["LOC", "PXB", "SYS"], ["4", "PCI"]),
        ("PROTO", ["LL", "Simple", "simple", "LL,Simple", "^LL128", "allreduce:LL"], ["LL64", ""]),
        ("PROTO", ["^LL128;allreduce:LL", "LL,Simple;allreduce:^LL"], ["allreduce:LL;Simple"]),
        ("ALGO", ["allreduce:tree", "allreduce:ring;broadcast:ring", "Ring", "^Tree"], ["Tree", "allreduce"]),
        ("ALGO", ["tree,ring", "ring,collnetdirect;allreduce:tree", "^nvls;allreduce:^tree"], ["^Ring", "tree,nvls"]),
        ("CTA_POLICY", ["EFFICIENCY", 1], ["efficient", 3]),
        ("MAX_CTAS", [1, 16, "64"], [0, 65, "many"]),
        ("NTHREADS", [64, 512], [100]),
        ("CUMEM_ENABLE", [0, 1], ["on"]),
        ("NVLS_ENABLE", [0, 2], [3]),
        ("BUFFSIZE", [4194304], ["4M"]),
        ("TREE_THRESHOLD", [], [0]),
        ("OF_SOME_LATER_RELEASE", ["anything"], []),
    ],
)
def test_values_that_nccl_does_not_have_are_told_with_those_that_it_has(
    variable: str, good: list[Any], bad: list[Any]
) -> None:
    assert [value_problem(f"NCCL_{variable}", value) for value in good] == [None] * len(good)
    assert all(value_problem(f"NCCL_{variable}", value) for value in bad)


def test_a_value_that_nccl_does_not_have_is_a_problem_of_its_line(tmp_path: Path) -> None:
    found = wrong(tmp_path, "sglang", "env.NCCL_ALGO: {choices: [unset, Tree], when: allreduce == 'nccl'}")
    assert found.startswith("parameters.env.NCCL_ALGO.choices[1]: 'Tree' is not valid; valid: by function")


def test_fewer_at_most_than_at_least_is_a_contradiction() -> None:
    assert contradictory({"NCCL_MIN_CTAS": "16", "NCCL_MAX_CTAS": "4"})
    assert "NCCL_MAX_CTAS, 4" in contradictory({"NCCL_MIN_CTAS": "16", "NCCL_MAX_CTAS": "4"})[0]
    for fine in ({"NCCL_MIN_CTAS": "4", "NCCL_MAX_CTAS": "16"}, {"NCCL_MIN_CTAS": "16", "NCCL_MAX_CTAS": None}, {}):
        assert contradictory(fine) == []
