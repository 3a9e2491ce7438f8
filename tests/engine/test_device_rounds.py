"""Rounds that stay on a device say what the host's say, wait for it once each, and run from graphs or not at all.

The device is played (`tests.engine.played_device`). Where there is an NVIDIA GPU, the last test asks torch itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build import Core, build
from engine.collectives.base import Group
from engine.config import DraftShape, EngineConfig, SpecConfig
from engine.errors import RanksDisagree
from engine.graphs import GraphCaptureError
from engine.reconfigure import reconfigure
from engine.spec.board import NO_TOKEN, Board
from engine.spec.device_round import DeviceRound
from engine.spec.round import Work
from tests.engine.conftest import VOCAB, generate, tiny_head, tiny_llama
from tests.engine.played_device import Played, PlayedCollective, PlayedDevice, There
from tests.engine.threads_as_ranks import ThreadCrew, on_ranks

DRAFTERS = {
    "none": ("none", 0, 1, 1),
    "ngram": ("ngram", 3, 1, 4),
    "chain": ("eagle3", 3, 1, 4),
    "tree": ("eagle3", 3, 2, 7),
    "draft_model": ("draft_model", 3, 1, 4),
    "hybrid": ("hybrid", 3, 1, 4),
    "hybrid tree": ("hybrid", 3, 2, 7),
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": 7},
    "likely": {"temperature": 0.9, "seed": 7, "min_p": 0.05},
    "cut": {"temperature": 0.9, "seed": 7, "top_p": 0.8, "top_k": 20, "min_p": 0.01},
}
PROMPTS = [[1, 2, 3], [9, 8], [4], [5, 6, 7, 8], [5, 6, 5, 6, 5, 6, 5]]


@pytest.fixture
def spec_of(head_file: Path, small_model: Path) -> Callable[..., SpecConfig]:
    def make(drafter: str, **more: Any) -> SpecConfig:
        return SpecConfig(
            *DRAFTERS[drafter], draft_head=str(head_file), draft_model=str(small_model), ngram_min=1, **more
        )

    return make


def settings(model: Path, spec: SpecConfig, **more: Any) -> EngineConfig:
    return EngineConfig(
        str(model), dtype="float32", page_size=4, threads=1, spec=spec, **{"max_running_requests": 5, **more}
    )


class Queued:
    """How often a round was queued on the device, and what waited for it meanwhile."""

    def __init__(self, core: Core, mode: Played) -> None:
        self.rounds, self.waits = 0, list[str]()
        queue = core.round._queue  # type: ignore[attr-defined]

        def watched(work: Sequence[Work], shape: DraftShape, resident: Any) -> Any:
            self.rounds += 1
            before = len(mode.waits)
            flight = queue(work, shape, resident)
            self.waits += mode.waits[before:]
            return flight

        core.round._queue = watched  # type: ignore[attr-defined]


@contextmanager
def playing(
    config: EngineConfig, crew: ThreadCrew | None = None, **device: Any
) -> Iterator[tuple[Core, PlayedDevice, Queued]]:
    with Played() as mode:
        played = PlayedDevice(mode, **device)
        core = build(config, crew, played)
        yield core, played, Queued(core, mode)


@pytest.fixture(autouse=True)
def graphs_may_be_required_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineConfig, "problems", lambda self: [])


@pytest.mark.parametrize("spec_version", ["v1", "v2"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_decoding_round_waits_once_and_says_what_the_host_says(
    tiny_model: Path, spec_of: Callable[..., SpecConfig], drafter: str, spec_version: str
) -> None:
    spec = spec_of(drafter, spec_version=spec_version)
    wanted = []
    for sampling in SAMPLINGS.values():
        host = build(settings(tiny_model, spec))
        wanted.append((generate(host, PROMPTS, max_tokens=12, **sampling), host.round.stats))
    with playing(settings(tiny_model, spec, cuda_graphs="required")) as (core, device, queued):
        for (told, stats), sampling in zip(wanted, SAMPLINGS.values(), strict=True):
            core.round.stats = type(stats)()
            before = queued.rounds
            assert generate(core, PROMPTS, max_tokens=12, **sampling) == told
            assert (core.round.stats.accepted, core.round.stats.rounds) == (stats.accepted, stats.rounds)
            assert queued.rounds - before == stats.rounds - 1, "all but the prompts' stay on the device"
    assert queued.waits == []
    assert device.fetches == queued.rounds
    assert not core.graphs.misses


@pytest.mark.parametrize("spec_version", ["v1", "v2"])
def test_what_a_branch_of_a_tree_has_stored_is_what_follows_read(
    tiny_model: Path, spec_of: Callable[..., SpecConfig], spec_version: str
) -> None:
    """The drafts are the text itself, each beside another one that comes first."""
    prompt = PROMPTS[0]
    text = prompt + generate(build(settings(tiny_model, SpecConfig())), [prompt], max_tokens=24)[0]

    def draft(board: Board, deepest: int) -> None:
        at = int(board.length.held) + 1  # type: ignore[attr-defined]
        right = [text[min(i, len(text) - 1)] for i in range(at, at + deepest)]
        wrong = [(token + 1) % 97 for token in right]
        nodes = [text[min(at, len(text)) - 1], wrong[0], right[0], wrong[1], right[1], right[2]]
        size = (1, 3, 5, 6)[int(board.steps.held)]  # type: ignore[attr-defined]
        for target, values, nothing in (
            (board.tokens, nodes, NO_TOKEN),
            (board.parent, [-1, 0, 0, 2, 2, 4], 0),
            (board.depth, [0, 1, 1, 2, 2, 3], 1),
        ):
            target.copy_(There(torch.tensor([values[:size] + [nothing] * (7 - size)])))
        board.size.fill_(size)

    with playing(settings(tiny_model, spec_of("tree", spec_version=spec_version))) as (core, _, queued):
        resident = core.drafter.resident
        assert resident is not None
        resident.draft = draft  # type: ignore[method-assign]
        assert generate(core, [prompt], max_tokens=24) == [text[len(prompt) :]]
        assert core.round.stats.accepted >= 15
        assert queued.waits == []


@pytest.mark.parametrize("spec_version", ["v1", "v2"])
def test_a_draft_that_makes_nan_is_done_without(
    tiny_model: Path, spec_of: Callable[..., SpecConfig], spec_version: str
) -> None:
    wanted = generate(build(settings(tiny_model, SpecConfig())), PROMPTS, max_tokens=10)
    bad = next(token for token in range(VOCAB) if not any(token in text for text in (*PROMPTS, *wanted)))
    with playing(settings(tiny_model, spec_of("chain", spec_version=spec_version))) as (core, _, queued):
        core.model.embedding.held[bad] = float("nan")  # type: ignore[attr-defined]
        resident = core.drafter.resident
        assert resident is not None
        draft, made = resident.draft, list[int]()

        def spoilt(board: Board, deepest: int) -> None:
            draft(board, deepest)
            if len(made) % 2:
                board.tokens[:, 1].copy_(torch.where(board.size > 1, bad, NO_TOKEN))
            made.append(bad)

        resident.draft = spoilt  # type: ignore[method-assign]
        assert generate(core, PROMPTS, max_tokens=10) == wanted
        assert queued.rounds > 3


@pytest.mark.parametrize("spec_version", ["v1", "v2"])
def test_a_draft_model_that_is_always_right_sees_all_that_was_accepted(tiny_model: Path, spec_version: str) -> None:
    spec = SpecConfig("draft_model", 3, 1, 4, draft_model=str(tiny_model), spec_version=spec_version)
    wanted = generate(build(settings(tiny_model, SpecConfig())), PROMPTS, max_tokens=17)
    with playing(settings(tiny_model, spec, cuda_graphs="required")) as (core, _, queued):
        assert generate(core, PROMPTS, max_tokens=17) == wanted
        assert core.round.stats.accepted == core.round.stats.drafted
        assert queued.waits == []


@pytest.mark.parametrize("drafter", ["none", "chain", "tree", "draft_model"])
def test_overlap_queues_a_round_before_the_outcome_of_the_last_is_known(
    tiny_model: Path, spec_of: Callable[..., SpecConfig], drafter: str
) -> None:
    for spec_version, ahead in (("v1", 0), ("v2", 1)):
        with playing(settings(tiny_model, spec_of(drafter, spec_version=spec_version))) as (core, device, _):
            generate(core, PROMPTS, max_tokens=12)
        last = max(number for _, number in device.log)
        assert last > 2
        for number in range(last):
            before = device.log[: device.log.index(("waited", number))]
            assert max(sent for what, sent in before if what == "sent") == number + ahead


def test_rounds_that_leave_the_device_and_come_back_go_on_where_they_were(
    tiny_model: Path, spec_of: Callable[..., SpecConfig]
) -> None:
    """Prompts that arrive late, log-probabilities, penalties and the first of so many tokens are the host's."""
    from engine.ipc.messages import SamplingParams, Submit

    asked = [
        SamplingParams(max_tokens=20),
        SamplingParams(max_tokens=8, logprobs=2),
        SamplingParams(max_tokens=15, temperature=1.0, seed=3),
        SamplingParams(max_tokens=6, presence_penalty=1.0),
        SamplingParams(max_tokens=12, min_tokens=6, stop_token_ids=tuple(range(0, VOCAB, 3))),
    ]

    def run(core: Core) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {i: [] for i in range(len(asked))}
        left = list(enumerate(zip(PROMPTS, asked, strict=True)))
        while left or core.scheduler.busy:
            if left:
                rid, (prompt, sampling) = left.pop(0)
                core.scheduler.submit(Submit(rid, tuple(prompt), sampling))
            for _ in range(3):
                for update in core.scheduler.step():
                    assert not update.error
                    found[update.rid].extend(update.token_ids)
        core.scheduler.land()
        core.scheduler.check()
        return found

    for spec_version in ("v1", "v2"):
        spec = spec_of("chain", spec_version=spec_version)
        wanted = run(build(settings(tiny_model, spec)))
        with playing(settings(tiny_model, spec)) as (core, _, queued):
            assert run(core) == wanted
        assert queued.rounds > 0
        assert queued.waits == []


def test_sampled_drafts_are_kept_or_replaced_by_the_host(tiny_model: Path, spec_of: Callable[..., SpecConfig]) -> None:
    spec = spec_of("chain", acceptance="rejection")
    wanted = generate(build(settings(tiny_model, spec)), PROMPTS, max_tokens=8, temperature=1.0, seed=5)
    with playing(settings(tiny_model, spec)) as (core, _, queued):
        assert generate(core, PROMPTS, max_tokens=8, temperature=1.0, seed=5) == wanted
        assert queued.rounds == 0
        generate(core, PROMPTS, max_tokens=8)
        assert queued.rounds > 0


def test_a_schedule_of_depths_has_graphs_of_each(tiny_model: Path, spec_of: Callable[..., SpecConfig]) -> None:
    spec = spec_of("chain", steps_by_batch=((1, 3), (3, 1), (5, 0)))
    wanted = generate(build(settings(tiny_model, SpecConfig())), PROMPTS, max_tokens=12)
    with playing(settings(tiny_model, spec, cuda_graphs="required")) as (core, _, queued):
        for count in (5, 3, 1):
            assert generate(core, PROMPTS[:count], max_tokens=12) == wanted[:count]
        assert not core.graphs.misses
        assert core.counters()['engine_graphs_active{phase="draft"}'] == 1
        assert core.counters()["engine_graph_replays_total"] == core.graphs.hits > queued.rounds
        reconfigure(core, {"num_steps": 2, "steps_by_batch": None})
        assert generate(core, PROMPTS[:2], max_tokens=12) == wanted[:2]
        assert core.graphs.misses["verify"] > 0, "a depth that was not captured runs eagerly, and is counted"


@pytest.mark.parametrize("in_warm_up", [True, False])
@pytest.mark.parametrize("phase", ["draft", "verify", "accept", "extend"])
def test_a_server_whose_capture_fails_does_not_come_up_or_says_what_it_fell_back_to(
    tiny_model: Path, spec_of: Callable[..., SpecConfig], phase: str, in_warm_up: bool
) -> None:
    broken = {"fail_at": (phase, 2), "in_warm_up": in_warm_up}
    with (
        pytest.raises(GraphCaptureError, match=f"{phase} for 2 requests .eagle3, 3 steps, 4 rows.*--cuda-graphs off"),
        playing(settings(tiny_model, spec_of("chain"), cuda_graphs="required"), **broken),
    ):
        pass
    wanted = generate(build(settings(tiny_model, SpecConfig())), PROMPTS, max_tokens=8)
    with playing(settings(tiny_model, spec_of("chain"), cuda_graphs="preferred"), **broken) as (core, _, queued):
        assert generate(core, PROMPTS, max_tokens=8) == wanted
        assert queued.rounds > 0
        assert core.graphs.hits == 0
        for each in ("draft", "verify", "accept", "extend"):
            told = core.info()["paths"][f"graphs.{each}"]
            assert told["state"] == "fell_back"
            assert f"{phase} for 2 requests" in told["detail"]
            assert core.counters()[f'engine_graphs_active{{phase="{each}"}}'] == 0
            assert core.counters()[f'engine_graph_misses_total{{phase="{each}"}}'] > 0


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model with SmolLM2's heads, which two ranks cannot share evenly, and a head for it."""
    folder = tmp_path_factory.mktemp("uneven")
    sizes = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 160}
    model = tiny_llama(folder / "model", **sizes)
    return model, tiny_head(build(settings(model, SpecConfig())), folder / "head.safetensors")


def on_devices(config: EngineConfig, work: Callable[[Core, Queued], Any], timeout_s: float = 30.0) -> list[Any]:
    def rank(crew: ThreadCrew) -> Any:
        crew.group = Group(crew.group.rank, config.tp, PlayedCollective(crew.group._collective))
        with playing(config, crew) as (core, _, queued):
            return work(core, queued)

    return on_ranks(config.tp, rank, timeout_s=timeout_s)


@pytest.mark.parametrize("spec_version", ["v1", "v2"])
@pytest.mark.parametrize("drafter", ["ngram", "chain", "tree"])
def test_ranks_with_devices_say_what_one_says(uneven: tuple[Path, Path], drafter: str, spec_version: str) -> None:
    model, head = uneven
    spec = SpecConfig(*DRAFTERS[drafter], draft_head=str(head), ngram_min=1, spec_version=spec_version)
    samplings = [SAMPLINGS["greedy"], SAMPLINGS["cut"]]
    wanted = [generate(build(settings(model, spec)), PROMPTS, max_tokens=10, **s) for s in samplings]

    def work(core: Core, queued: Queued) -> object:
        found = [generate(core, PROMPTS, max_tokens=10, **s) for s in samplings]
        assert queued.rounds > 0
        assert queued.waits == []
        return found

    for found in on_devices(settings(model, spec, tp=2, cuda_graphs="required"), work):
        assert found == wanted


def test_a_rank_whose_drafts_differ_is_found_out(uneven: tuple[Path, Path]) -> None:
    def work(core: Core, queued: Queued) -> None:
        resident = core.drafter.resident
        assert resident is not None
        if core.model.group.rank:
            resident.look_up = lambda rids, steps: [[1] * n for n in steps]  # type: ignore[method-assign]
        generate(core, PROMPTS, max_tokens=10)

    with pytest.raises(RanksDisagree, match="rank 1 has other draft tokens than rank 0"):
        on_devices(settings(uneven[0], SpecConfig("ngram", 3, 1, 4, ngram_min=1), tp=2), work, timeout_s=2.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU")
@pytest.mark.parametrize("spec_version", ["v1", "v2"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_on_a_gpu_nothing_waits_while_a_round_is_queued(
    tiny_model: Path,
    spec_of: Callable[..., SpecConfig],
    drafter: str,
    spec_version: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = DeviceRound._queue

    def strict(self: DeviceRound, *args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return queue(self, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    spec = spec_of(drafter, spec_version=spec_version)
    wanted = generate(build(settings(tiny_model, spec)), PROMPTS, max_tokens=12)
    for graphs in ("off", "required"):
        core = build(settings(tiny_model, spec, device="cuda", cuda_graphs=graphs))
        generate(core, PROMPTS, max_tokens=12)  # kernels are compiled and tuned
        monkeypatch.setattr(DeviceRound, "_queue", strict)
        assert generate(core, PROMPTS, max_tokens=12) == wanted
        monkeypatch.setattr(DeviceRound, "_queue", queue)
