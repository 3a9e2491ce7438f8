"""The draft head: its cache is what a fresh run would leave, trees see their ancestors, foreign heads do not load."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine.build import Core
from engine.config import DraftShape, SpecConfig
from engine.errors import InvalidConfig, ModelBroken
from engine.export_head import export_head
from engine.ipc.messages import SamplingParams, Submit
from engine.model.head_file import load_head
from engine.spec.alarm import AcceptanceAlarm
from engine.spec.base import Asked
from engine.spec.eagle3 import Eagle3Drafter
from tests.engine.conftest import VOCAB, generate, tiny_llama
from tests.engine.test_spec import prompts

CHAIN, TREE = SpecConfig("eagle3", 4, 1, 5), SpecConfig("eagle3", 4, 3, 20)


def drafter_of(core: Core) -> Eagle3Drafter:
    assert isinstance(core.drafter, Eagle3Drafter)
    return core.drafter


def run_until(core: Core, prompt: list[int], tokens: int) -> list[int]:
    """Text of one running request after at least this many output tokens."""
    core.scheduler.submit(Submit(1, tuple(prompt), SamplingParams(max_tokens=200)))
    text = list(prompt)
    while len(text) < len(prompt) + tokens:
        text += [t for update in core.scheduler.step() for t in update.token_ids]
    return text


def standing(core: Core, length: int) -> Asked:
    """The one running request of the core, asked for drafts."""
    request = next(iter(core.scheduler._running.values()))
    spec = core.gate.config
    assert len(request.tokens) == length
    assert core.pages.grow(request.row, length + spec.shape.slots)
    return Asked(
        [request.rid],
        np.array([request.row]),
        np.array([length - 1]),
        np.array([request.tokens[-1]]),
        np.array([spec.num_steps]),
        spec.shape,
        np.zeros(1),
        np.zeros(1, dtype=np.uint64),
    )


@pytest.mark.parametrize("spec", [CHAIN, TREE])
@pytest.mark.parametrize("page_size", [1, 4])
def test_after_many_rounds_the_drafts_are_those_of_a_fresh_run_over_the_same_text(
    make_core: Callable[..., Core], head_file: Path, spec: SpecConfig, page_size: int
) -> None:
    spec = replace(spec, draft_head=str(head_file))
    core = make_core(spec, page_size=page_size)
    text = run_until(core, prompts(3)[0], 30)
    fresh = make_core(spec, page_size=page_size, prefill_tokens=7)
    fresh.scheduler.submit(Submit(1, tuple(text[:-1]), SamplingParams(max_tokens=200)))
    while not any(update.token_ids for update in fresh.scheduler.step()):
        pass
    old, new = (drafter_of(c)._hidden[standing(c, len(text)).rows[0]] for c in (core, fresh))
    assert torch.allclose(old, new, atol=1e-4)
    trees = [drafter_of(c).propose(standing(c, len(text))) for c in (core, fresh)]
    assert trees[0].tokens.tolist() == trees[1].tokens.tolist()
    assert trees[0].parent.tolist() == trees[1].parent.tolist()


def test_a_node_of_a_tree_is_drafted_from_its_true_ancestors(make_core: Callable[..., Core], head_file: Path) -> None:
    """Every child in the tree is what the head likes best after running the path to its parent as a chain."""
    core = make_core(replace(TREE, draft_head=str(head_file), num_draft_tokens=30))
    text = run_until(core, prompts(3)[1], 5)
    drafter, asked = drafter_of(core), standing(core, len(text))
    tree = drafter.propose(asked)
    start = np.arange(2)
    checked = 0
    for node in range(1, len(tree.tokens)):
        path, at = [], node
        while at > 0:
            path.insert(0, int(tree.tokens[at]))
            at = int(tree.parent[at])
        children = tree.tokens[tree.parent == node].tolist()
        if not children:
            continue
        x = drafter._hidden[torch.from_numpy(asked.rows)]
        for i, token in enumerate(path):
            at_position = asked.lengths + i
            view = drafter._view(asked.rows, np.zeros(1, int), np.array([token]), at_position, at_position, start)
            x = drafter._head.step(x, view, drafter._pool)
        best = drafter._best(x, 3)[1][0].tolist()
        assert set(children) <= set(best)
        assert best[0] in children
        checked += 1
    assert checked >= 5
    assert tree.depth.max() >= 3


def test_a_chain_is_the_first_branch_of_the_tree(make_core: Callable[..., Core], head_file: Path) -> None:
    core = make_core(replace(TREE, draft_head=str(head_file)))
    asked = standing(core, len(run_until(core, prompts(3)[2], 4)))
    chain = drafter_of(core).propose(replace(asked, shape=DraftShape(4, 1, 5)))
    assert chain.chain
    assert len(chain.tokens) == 5
    tree = drafter_of(core).propose(replace(asked, shape=DraftShape(1, 3, 4)))
    assert chain.tokens[1] == tree.tokens[1]


def test_trees_accept_more_than_chains_of_the_same_depth(make_core: Callable[..., Core], head_file: Path) -> None:
    """With a random head hardly anything is accepted, but a wider net never catches less."""
    caught = []
    for spec in (SpecConfig("eagle3", 2, 1, 3), SpecConfig("eagle3", 2, 8, 64)):
        core = make_core(replace(spec, draft_head=str(head_file)))
        generate(core, prompts(7), max_tokens=60)
        caught.append(core.round.stats.accepted / core.round.stats.verify_steps)
    assert caught[1] > caught[0]


def test_a_head_survives_its_file(make_core: Callable[..., Core], head_file: Path) -> None:
    loaded = load_head(head_file, make_core().model, "tiny")
    assert loaded.shape.layers == (0, 1, 2)
    assert loaded.hot.tolist() == list(range(60))
    assert loaded.weights["lm_head"].abs().max() < 2


def test_an_exported_head_computes_what_the_served_one_does(
    make_core: Callable[..., Core], head_file: Path, tmp_path: Path
) -> None:
    """One position of the exported layout (vLLM's names, vLLM's order of operations), written out plainly."""
    core = make_core(replace(CHAIN, draft_head=str(head_file)))
    export_head(load_head(head_file, core.model, "tiny"), core.model.config, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    w = {name: value.float() for name, value in load_file(tmp_path / "out" / "model.safetensors").items()}
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert w["t2d"].sum() == 60
    assert (w["d2t"] + torch.arange(60) == torch.arange(60)).all()

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], w[name], config["rms_norm_eps"])

    features, token = torch.randn(3 * config["hidden_size"]), 7
    chunks = [norm(chunk, f"fc_norm.{i}.weight") for i, chunk in enumerate(features.chunk(3))]
    x = w["fc.weight"] @ torch.cat(chunks)
    embedded = norm(core.model.embedding[token].float(), "midlayer.input_layernorm.weight")
    both = torch.cat((embedded, norm(x, "midlayer.hidden_norm.weight")))
    # With one position, attention returns its own value, once for each query head of the group.
    value = (w["midlayer.self_attn.v_proj.weight"] @ both).view(config["num_key_value_heads"], -1)
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    x = x + w["midlayer.self_attn.o_proj.weight"] @ value.repeat_interleave(group, 0).flatten()
    inner = norm(x, "midlayer.post_attention_layernorm.weight")
    gate, up = (w[f"midlayer.mlp.{part}_proj.weight"] @ inner for part in ("gate", "up"))
    x = x + w["midlayer.mlp.down_proj.weight"] @ (torch.nn.functional.silu(gate) * up)
    drafter, row = drafter_of(core), core.pages.open_row()
    core.pages.grow(row, 1)
    at, start = np.zeros(1, dtype=int), np.arange(2)
    view = drafter._view(np.array([row]), at, np.array([token]), at, at, start)
    served = drafter._head.extend(features[None], view, drafter._pool)
    assert torch.allclose(served[0], x, atol=0.02, rtol=0.02)
    exported = w["lm_head.weight"] @ norm(x, "norm.weight")
    assert torch.allclose(drafter._head.logits(served)[0], exported, atol=0.1, rtol=0.05)


def edited(file: Path, target: Path, change: Callable[[dict, dict], None]) -> Path:
    tensors = load_file(file)
    with safe_open(file, framework="pt") as opened:
        header = opened.metadata()
    change(tensors, header)
    save_file(tensors, target, metadata=header)
    return target


def _no_format(tensors: dict, header: dict) -> None:
    header["format"] = "something else"


def _other_target(tensors: dict, header: dict) -> None:
    header["about"] = json.dumps({"target": "another", "target_fingerprint": "0" * 32})


def _deep_layers(tensors: dict, header: dict) -> None:
    header["shape"] = json.dumps({**json.loads(header["shape"]), "layers": [0, 1, 9]})


def _wide(tensors: dict, header: dict) -> None:
    header["shape"] = json.dumps({**json.loads(header["shape"]), "hidden": 64})


def _cut(tensors: dict, header: dict) -> None:
    tensors["fc"] = tensors["fc"][:, :-1].contiguous()


def _foreign_ids(tensors: dict, header: dict) -> None:
    tensors["hot_ids"] = tensors["hot_ids"] + VOCAB


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_no_format, "is not a draft head"),
        (_other_target, "trained for 'another'"),
        (_deep_layers, "reads layers [0, 1, 9]"),
        (_wide, "chunk_norm is [144], not [192]"),
        (_cut, "fc is"),
        (_foreign_ids, "token ids that the target"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_with_the_reason(
    make_core: Callable[..., Core], head_file: Path, tmp_path: Path, change: Callable[[dict, dict], None], says: str
) -> None:
    file = edited(head_file, tmp_path / "head.safetensors", change)
    with pytest.raises(ModelBroken, match=says.replace("[", r"\[").replace("]", r"\]")):
        make_core(replace(CHAIN, draft_head=str(file)))


def test_without_a_head_or_model_the_drafter_is_refused(make_core: Callable[..., Core], tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="no head ships for"):
        make_core(CHAIN)
    with pytest.raises(ModelBroken, match="cannot read"):
        make_core(replace(CHAIN, draft_head=str(tmp_path / "missing.safetensors")))
    with pytest.raises(InvalidConfig, match="none is named"):
        make_core(SpecConfig("draft_model", 2, 1, 3))
    other = tiny_llama(tmp_path / "other", vocab_size=VOCAB + 1)
    with pytest.raises(InvalidConfig, match=f"vocabulary of {VOCAB + 1}"):
        make_core(SpecConfig("draft_model", 2, 1, 3, draft_model=str(other)))


def test_a_collapse_of_acceptance_is_said_once_with_likely_causes(
    make_core: Callable[..., Core], head_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = make_core(replace(CHAIN, draft_head=str(head_file))).drafter
    alarm = AcceptanceAlarm()
    with caplog.at_level(logging.WARNING):
        for _ in range(300):
            alarm.observe(drafter, 10, 0)
    assert len(caplog.records) == 1
    assert "wrong layers" in alarm.path()["acceptance"]["detail"]
    for _ in range(100):
        alarm.observe(drafter, 10, 5)
    assert alarm.path() == {}
