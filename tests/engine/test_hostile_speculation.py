"""Whatever is combined with whatever, and whatever comes in between: outputs are those of plain decoding.

`FUZZ_SPECULATION=500` tries that many combinations in place of a few.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine.build import Core
from engine.config import SpecConfig, tree_capacity
from engine.errors import InvalidConfig, ModelBroken
from engine.ipc.messages import SamplingParams, Submit, TokenUpdate
from engine.model.head_file import read_head
from engine.reconfigure import reconfigure
from engine.scheduler.lane import InlineLane
from tests.engine.conftest import VOCAB, generate
from tests.engine.test_overlap import LateInlineLane
from tests.engine.test_spec import Branching, prompts

EXAMPLES = int(os.environ.get("FUZZ_SPECULATION", "15"))
Rng = np.random.Generator


def one_of(rng: Rng, *choices: object) -> object:
    return choices[int(rng.integers(len(choices)))]


def random_changes(rng: Rng) -> dict[str, object]:
    """Hot settings that are valid together, beginning with the drafter."""
    name = one_of(rng, "none", "ngram", "eagle3", "eagle3", "draft_model", "hybrid", "hybrid")
    changes: dict[str, object] = {"speculation": name, "spec_version": one_of(rng, "v1", "v2")}
    changes |= {"topk": 1, "policy": "fixed", "acceptance": "target", "hybrid_steps": None}
    changes |= {"steps_by_batch": None, "disable_batch_threshold": None}
    if name == "none":
        return changes
    steps = changes["num_steps"] = int(rng.integers(1, 9))
    topk = 1
    if name in ("eagle3", "hybrid"):
        topk = changes["topk"] = int(one_of(rng, 1, 1, 2, 4, 8))
    if topk > 1:
        changes["num_draft_tokens"] = int(rng.integers(2, min(64, tree_capacity(steps, topk)) + 1))
    else:
        changes["acceptance"] = one_of(rng, "target", "target", "rejection")
    when = rng.integers(4)
    if when == 1:
        changes["disable_batch_threshold"] = int(rng.integers(1, 5))
    elif when == 2:
        sizes = sorted({1, *rng.integers(2, 6, rng.integers(1, 4)).tolist()})
        changes["steps_by_batch"] = {str(size): int(rng.integers(0, steps + 1)) for size in sizes}
    elif when == 3:
        changes["policy"] = "adaptive"
    if name == "hybrid" and rng.random() < 0.5:
        changes["hybrid_steps"] = int(rng.integers(1, 9))
    return changes


def random_request(rng: Rng, shared: list[int]) -> tuple[tuple[int, ...], SamplingParams]:
    """Prompts with common beginnings; every kind of sampling."""
    own = rng.integers(1, VOCAB, rng.integers(1, 30)).tolist()
    prompt = [*shared[: int(rng.integers(0, len(shared)))], *own] if rng.random() < 0.6 else own
    given: dict[str, object] = {"max_tokens": int(rng.integers(1, 50)), "seed": int(rng.integers(2**62))}
    if rng.random() < 0.5:
        given |= {"temperature": float(one_of(rng, 1e-3, 0.7, 1.0, 2.5))}
        given |= {"top_p": float(one_of(rng, 1.0, 0.8, 0.05)), "top_k": int(one_of(rng, 0, 0, 1, 7))}
        given |= {"min_p": float(one_of(rng, 0.0, 0.0, 0.2))}
    if rng.random() < 0.3:
        given |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": -0.2}
    if rng.random() < 0.2:
        given["logit_bias"] = ((5, 3.0), (9, -100.0))
    if rng.random() < 0.4:
        given["stop_token_ids"] = tuple(rng.integers(0, VOCAB, 4).tolist())
    if rng.random() < 0.3:
        given["logprobs"] = int(rng.integers(0, 3))
    if rng.random() < 0.2:
        given["prompt_logprobs"] = 1
    return tuple(prompt), SamplingParams(**given)


class Traffic:
    """Requests that come, end and are given up while settings change."""

    def __init__(self, core: Core, rng: Rng) -> None:
        self.core, self.rng = core, rng
        self.updates: dict[int, list[TokenUpdate]] = {}
        self.asked: dict[int, tuple[tuple[int, ...], SamplingParams]] = {}
        self.given_up: set[int] = set()
        self.rejection = core.round.rejection

    def run(self, requests: list[tuple[tuple[int, ...], SamplingParams]], changes: int) -> None:
        left = list(requests)
        rng, scheduler = self.rng, self.core.scheduler
        while left or scheduler.busy:
            if left and rng.random() < 0.5:
                rid = len(self.asked)
                self.asked[rid] = left.pop()
                self.updates[rid] = []
                refused = scheduler.submit(Submit(rid, *self.asked[rid]))
                assert refused is None, refused
            if rng.random() < 0.03 and self.asked:
                rid = int(rng.integers(len(self.asked)))
                self.given_up.add(rid)
                scheduler.abort(rid)
            if changes and rng.random() < 0.1:
                changes -= 1
                self.take(reconfigure(self.core, random_changes(rng))[1])
                self.rejection |= self.core.round.rejection
            if rng.random() < 0.02:
                self.core.prefix.flush()
            self.take(scheduler.step())
        self.take(scheduler.land())
        scheduler.check()

    def take(self, updates: tuple[TokenUpdate, ...]) -> None:
        for update in updates:
            assert not update.error, update.error
            assert update.rid not in self.given_up
            told = self.updates[update.rid]
            assert not any(u.finish for u in told)
            told.append(update)


def alone(core: Core, prompt: tuple[int, ...], params: SamplingParams) -> list[TokenUpdate]:
    """What it is told on an engine of its own."""
    assert core.scheduler.submit(Submit(0, prompt, params)) is None
    updates = [update for _ in iter(lambda: core.scheduler.busy, False) for update in core.scheduler.step()]
    core.scheduler.land()
    return updates


def said(updates: list[TokenUpdate]) -> list[int]:
    return [token for update in updates for token in update.token_ids]


def told_apart_by_nothing(
    make_core: Callable[..., Core], prompt: tuple[int, ...], params: SamplingParams, got: list[int], right: list[int]
) -> bool:
    """Whether what plain decoding says where two texts part hangs on the last bits: on how many rows run together."""
    at = next(i for i, (a, b) in enumerate(zip(got, right, strict=False)) if a != b)
    begin = (*prompt, *right[:at])
    if params.changes_logits:
        return False  # output counts otherwise than prompt
    one = replace(params, max_tokens=1, prompt_logprobs=None)
    cores = [make_core(prefix_cache=False, prefill_tokens=n) for n in (512, 3)]
    return got[at] in [said(alone(core, begin, one))[0] for core in cores]


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(seed=st.integers(0, 2**32))
def test_any_settings_any_traffic_any_change_and_every_output_is_that_of_plain_decoding(
    make_core: Callable[..., Core], head_file: Path, small_model: Path, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    spec = SpecConfig(draft_head=str(head_file), draft_model=str(small_model), ngram_min=int(rng.integers(1, 3)))
    spec = replace(spec, hybrid=one_of(rng, ("ngram", "eagle3"), ("ngram", "eagle3"), ("eagle3", "ngram")))
    core = make_core(
        spec,
        page_size=one_of(rng, 1, 2, 3, 4, 16),
        prefill_tokens=one_of(rng, 1, 5, 16, 512),
        prefix_cache=bool(rng.random() < 0.7),
        max_running_requests=one_of(rng, 1, 2, 4, 8),
        kv_tokens=one_of(rng, 128, 200, 400, 4000),
    )
    reconfigure(core, random_changes(rng))
    if rng.random() < 0.5 and core.scheduler.overlapping:
        core.scheduler.use_lane(LateInlineLane())  # where results come as late as they can
    traffic = Traffic(core, rng)
    shared = rng.integers(1, VOCAB, 40).tolist()
    traffic.run([random_request(rng, shared) for _ in range(8)], changes=int(rng.integers(0, 6)))
    core.scheduler.use_lane(InlineLane())
    plain = make_core(prefix_cache=False)
    for rid, (prompt, params) in traffic.asked.items():
        got, expected = traffic.updates[rid], alone(plain, prompt, params)
        tokens, right = said(got), said(expected)
        if rid in traffic.given_up:
            right = right[: len(tokens)]
        if params.temperature and traffic.rejection:
            assert len(tokens) <= params.max_tokens  # the text of a seed depends on the drafter there
            continue
        if tokens != right:
            assert told_apart_by_nothing(make_core, prompt, params, tokens, right)
            continue
        if rid in traffic.given_up:
            continue
        assert got[-1].finish == expected[-1].finish
        for what in ("logprobs", "prompt_logprobs"):
            values = [[entry.value for u in updates for entry in getattr(u, what)] for updates in (got, expected)]
            assert np.allclose(*values, atol=1e-3)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(seed=st.integers(0, 2**32))
def test_any_change_is_made_whole_or_refused_with_a_reason(
    make_core: Callable[..., Core], head_file: Path, small_model: Path, seed: int
) -> None:
    """Values of any type under any name, while requests run; the server serves on."""
    rng = np.random.default_rng(seed)
    core = make_core(SpecConfig("ngram", 2, 1, 3, draft_head=str(head_file), draft_model=str(small_model)))
    expected = generate(core, prompts(3))
    values = [None, True, -1, 0, 1, 3, 9, 2**70, 1.5, float("nan"), "", "3", "eagle3", "none", "v2", "never"]
    values += [
        "1:2,x",
        "1:0,1:3",
        "0:1",
        {},
        {"1": 2},
        {"1": "2"},
        {1: 1, "01": 2},
        [],
        [1],
        b"x",
        "rejection",
        "adaptive",
    ]
    names = ["speculation", "num_steps", "topk", "num_draft_tokens", "spec_version", "disable_batch_threshold"]
    names += ["steps_by_batch", "hybrid_steps", "policy", "acceptance", "draft_head", "model", "", "__class__"]
    for rid, prompt in enumerate(prompts(3)):
        core.scheduler.submit(Submit(rid, tuple(prompt), SamplingParams(max_tokens=40)))
    outputs: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while core.scheduler.busy:
        before, epoch = core.effective(), core.epoch
        changes = {str(one_of(rng, *names)): one_of(rng, *values) for _ in range(rng.integers(1, 3))}
        updates: tuple[TokenUpdate, ...] = ()
        refused = ""
        try:
            updates = reconfigure(core, changes)[1]
        except InvalidConfig as error:
            refused = str(error)
        if core.epoch == epoch:
            assert refused
            assert core.effective() == before
        for update in (*updates, *core.scheduler.step()):
            assert not update.error
            outputs[update.rid] += update.token_ids
    reconfigure(core, {"spec_version": "v1"})
    core.scheduler.check()
    assert list(outputs.values()) == expected


NAN_SPECS = {
    "chain": SpecConfig("eagle3", 4, 1, 5),
    "sampled chain": SpecConfig("eagle3", 4, 1, 5, acceptance="rejection"),
    "tree": SpecConfig("eagle3", 4, 4, 16),
    "draft_model": SpecConfig("draft_model", 3, 1, 4),
    "sampled draft_model": SpecConfig("draft_model", 3, 1, 4, acceptance="rejection"),
    "hybrid tree": SpecConfig("hybrid", 4, 4, 16),
}


def break_drafter(core: Core) -> None:
    """Everything that it computes becomes NaN."""
    drafter = getattr(core.drafter, "_second", core.drafter)
    model = getattr(drafter, "_head", None) or drafter._model
    logits = model.logits
    model.logits = lambda x: logits(x).fill_(float("nan"))


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("name", NAN_SPECS)
def test_nan_from_a_drafter_costs_acceptance_and_nothing_else(
    make_core: Callable[..., Core], head_file: Path, small_model: Path, name: str, version: str
) -> None:
    spec = replace(NAN_SPECS[name], draft_head=str(head_file), draft_model=str(small_model), spec_version=version)
    core = make_core(spec)
    break_drafter(core)
    assert generate(core, prompts(3)) == generate(make_core(), prompts(3))
    sampling = {"temperature": 0.9, "seed": 4}
    sampled = generate(core, prompts(3), **sampling)
    if spec.acceptance == "target":
        assert sampled == generate(make_core(), prompts(3), **sampling)
    core.scheduler.use_lane(InlineLane())


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("name", NAN_SPECS)
def test_nan_from_the_target_fails_that_request_and_no_other(
    make_core: Callable[..., Core], head_file: Path, small_model: Path, name: str, version: str
) -> None:
    """One token makes NaN of whatever text it is in. A request that says it fails, if it was only drafted none does."""
    spec = replace(NAN_SPECS[name], draft_head=str(head_file), draft_model=str(small_model), spec_version=version)
    core = make_core(spec, max_running_requests=3)
    core.model._embedding[7] = float("nan")
    plain = make_core()
    asked = [prompt for prompt in prompts(12) if 7 not in prompt]
    expected = [said(alone(plain, tuple(prompt), SamplingParams(max_tokens=40))) for prompt in asked]
    assert 0 < sum(7 in text[:-1] for text in expected) < len(asked)
    outputs: dict[int, list[int]] = {rid: [] for rid in range(len(asked))}
    errors: dict[int, str] = {}
    for rid, prompt in enumerate([*asked, [1, 7, 2]]):
        core.scheduler.submit(Submit(rid, tuple(prompt), SamplingParams(max_tokens=40)))
    while core.scheduler.busy:
        for update in core.scheduler.step():
            if update.error:
                errors[update.rid] = update.error
            else:
                outputs[update.rid] += update.token_ids
    core.scheduler.land()
    core.scheduler.check()
    for rid, right in enumerate(expected):
        if 7 in right[:-1]:
            assert "NaN" in errors[rid]
            assert outputs[rid] == right[: len(outputs[rid])]
        else:
            assert rid not in errors
            assert outputs[rid] == right
    assert "NaN" in errors[len(asked)]
    core.scheduler.use_lane(InlineLane())


def test_a_wrong_branch_that_makes_nan_harms_neither_its_tree_nor_its_request(
    make_core: Callable[..., Core], head_file: Path
) -> None:
    core = make_core(SpecConfig("eagle3", 4, 2, 9, draft_head=str(head_file)))
    asked = [prompt for prompt in prompts(12) if 7 not in prompt]
    expected = generate(make_core(), asked)
    fine = [i for i, text in enumerate(expected) if 7 not in text]
    core.model._embedding[7] = float("nan")

    class Sevens:
        """Stands in for the coins of the drafter: every wrong branch is token 7."""

        def integers(self, low: int, high: int, size: int) -> np.ndarray:
            return np.full(size, 7)

        def random(self) -> float:
            return 0.5  # the wrong branch first

    known = {i: asked[at] + expected[at] for i, at in enumerate(fine)}
    core.scheduler.use_drafter(Branching(known, Sevens()))  # type: ignore[arg-type]
    assert generate(core, [asked[at] for at in fine]) == [expected[at] for at in fine]


def rewritten(file: Path, target: Path, tensors: dict[str, torch.Tensor], header: dict[str, str]) -> Path:
    """A head's file with some parts replaced."""
    with safe_open(file, framework="pt") as opened:
        whole = {**(opened.metadata() or {}), **header}
    save_file({**load_file(file), **tensors}, target, metadata=whole)
    return target


def shape_with(file: Path, **changes: object) -> dict[str, str]:
    """The header of a head whose shape says something else."""
    return {"shape": json.dumps({**read_head(file).shape.to_dict(), **changes})}


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": [0, 1]},
        {"layers": [0, 1, 2, 2]},
        {"layers": [0, 1, 2.0]},
        {"layers": [-1, 1, 2]},
        {"layers": "012"},
        {"layers": None},
        {"hidden": "48"},
        {"hidden": -48},
        {"q_heads": 5},
        {"kv_heads": 0},
        {"head_dim": 7},
        {"head_dim": True},
        {"rope_theta": 0},
        {"rope_theta": "x"},
        {"draft_vocab": 4},
        {"draft_vocab": 61},
        {"unknown": 1},
    ],
    ids=str,
)
def test_a_head_with_a_shape_that_cannot_be_is_refused(
    make_core: Callable[..., Core], head_file: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    file = rewritten(head_file, tmp_path / "head.safetensors", {}, shape_with(head_file, **changes))
    with pytest.raises(ModelBroken, match="draft_head"):
        make_core(SpecConfig("eagle3", 3, 1, 4, draft_head=str(file)))


@pytest.mark.parametrize(
    "about",
    [
        None,
        [],
        "x",
        {},
        {"target_fingerprint": None},
        {"check": 5},
        {"check": {"prompt": [1]}},
        {"check": {"prompt": [], "accept_length": 1}},
        {"check": {"prompt": ["a"], "accept_length": 1}},
        {"check": {"prompt": [1, VOCAB], "accept_length": 2}},
        {"check": {"prompt": [-1], "accept_length": 2}},
        {"check": {"prompt": [1], "accept_length": "2"}},
    ],
    ids=str,
)
def test_a_head_that_does_not_say_where_it_comes_from_is_refused(
    make_core: Callable[..., Core], head_file: Path, tmp_path: Path, about: object
) -> None:
    whole = {**read_head(head_file).about, **about} if isinstance(about, dict) and "check" in about else about
    file = rewritten(head_file, tmp_path / "head.safetensors", {}, {"about": json.dumps(whole)})
    with pytest.raises(ModelBroken, match="draft_head"):
        make_core(SpecConfig("eagle3", 3, 1, 4, draft_head=str(file)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hot_ids", torch.zeros(60, dtype=torch.int32)),
        ("hot_ids", torch.arange(59, dtype=torch.int32)),
        ("hot_ids", torch.arange(60, dtype=torch.int32) - 1),
        ("hot_ids", torch.arange(60, dtype=torch.int32).view(60, 1)),
        ("final_norm", torch.full((48,), float("nan"), dtype=torch.bfloat16)),
        ("lm_head.scale", torch.full((60,), float("inf"))),
        ("lm_head.scale", torch.ones(59)),
        ("lm_head.int8", torch.zeros(60, 47, dtype=torch.int8)),
    ],
)
def test_a_head_with_tensors_that_cannot_be_is_refused(
    make_core: Callable[..., Core], head_file: Path, tmp_path: Path, name: str, value: torch.Tensor
) -> None:
    file = rewritten(head_file, tmp_path / "head.safetensors", {name: value}, {})
    with pytest.raises(ModelBroken, match="draft_head"):
        make_core(SpecConfig("eagle3", 3, 1, 4, draft_head=str(file)))


@settings(max_examples=4 * EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_damaged_file_is_a_head_or_refused_and_nothing_else(
    head_file: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = head_file.read_bytes()
    damage = data.draw(st.sampled_from(["cut", "flip in the header", "flip", "grow"]))
    if damage == "cut":
        made = whole[: data.draw(st.integers(0, len(whole) - 1))]
    elif damage == "grow":
        made = whole + b"x" * data.draw(st.integers(1, 100))
    else:
        most = 8 + int.from_bytes(whole[:8], "little") if damage == "flip in the header" else len(whole)
        at = data.draw(st.integers(0, most - 1))
        made = whole[:at] + bytes([whole[at] ^ (1 << data.draw(st.integers(0, 7)))]) + whole[at + 1 :]
    file = tmp_path_factory.mktemp("damaged") / "head.safetensors"
    file.write_bytes(made)
    refused = None
    try:
        read_head(file)
    except ModelBroken as error:
        refused = str(error)
    assert damage.startswith("flip") if refused is None else str(file) in refused
