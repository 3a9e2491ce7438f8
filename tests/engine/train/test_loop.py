"""Training that is killed and started again ends where training that was not ends, with a head that serves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.build import Core
from engine.config import SpecConfig
from engine.errors import InvalidConfig
from engine.model.eagle3 import HeadShape
from engine.model.head_file import read_head
from engine.train.corpus import Conversation
from engine.train.loop import Bench, Progress, Recipe, Trainer
from engine.train.target import Teacher, answer
from engine.worker import warm_up
from tests.engine.conftest import VOCAB, generate
from tests.engine.test_spec import prompts

RECIPE = Recipe(tokens=2500, sequences=2, warmup_steps=3, ridge_positions=600, rate=5e-3)


class Frame:
    def prompt(self, user: tuple[int, ...]) -> tuple[int, ...]:
        return (1, 2, *user, 3)


@pytest.fixture
def trainer_in(make_core: Callable[..., Core]) -> Callable[[Path], tuple[Trainer, list[Conversation]]]:
    core = make_core()
    frame, rng = Frame(), np.random.default_rng(3)
    users = [tuple(rng.integers(1, VOCAB, 5).tolist()) for _ in range(90)]
    answers = answer(core, [frame.prompt(user) for user in users], 40, (), 0.7, 0)
    conversations = [Conversation(u, tuple(a), 0.7, "") for u, a in zip(users, answers, strict=True)]
    config = core.model.config
    shape = HeadShape(config.hidden, config.q_heads, config.kv_heads, config.head_dim, 64, VOCAB, 10000.0, (0, 1, 2))

    def make(folder: Path) -> tuple[Trainer, list[Conversation]]:
        folder.mkdir(exist_ok=True)
        teacher = Teacher(core, shape.layers)
        held = [(*frame.prompt(c.user), *c.response) for c in conversations[80:]]
        bench = Bench(teacher.teach(held), [8] * len(held))
        return Trainer(folder, RECIPE, shape, teacher, frame, np.arange(VOCAB), bench), conversations[:80]

    return make


def test_a_killed_training_ends_where_one_that_was_not_ends(
    trainer_in: Callable[[Path], tuple[Trainer, list[Conversation]]], tmp_path: Path
) -> None:
    whole, some = trainer_in(tmp_path / "whole")
    whole.begin(some)
    whole.run(some, lambda progress: None, 1e9)
    killed = 0
    for _ in range(50):
        trainer, some = trainer_in(tmp_path / "killed")
        trainer.begin(some)
        left = [5]

        def tick(progress: Progress, left: list[int] = left) -> None:
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt

        try:
            trainer.run(some, tick, 0.0)
        except KeyboardInterrupt:
            killed += 1
            continue
        break
    assert killed >= 5
    assert trainer.progress.tokens == whole.progress.tokens >= RECIPE.tokens
    assert trainer.progress.steps == whole.progress.steps
    for name, weight in whole.averaged.items():
        torch.testing.assert_close(trainer.averaged[name], weight, atol=1e-4, rtol=1e-3)
    assert [point["tokens"] for point in trainer.progress.curve][-1] == whole.progress.tokens


def test_what_training_makes_is_a_head_that_serves_and_says_where_it_comes_from(
    trainer_in: Callable[[Path], tuple[Trainer, list[Conversation]]], make_core: Callable[..., Core], tmp_path: Path
) -> None:
    trainer, some = trainer_in(tmp_path)
    trainer.begin(some)
    trainer.run(some, lambda progress: None, 1e9)
    file = tmp_path / "head.safetensors"
    trainer.export(file, "tiny", "made by a test")
    about = read_head(file).about
    assert about["licence"] == "Apache-2.0"
    assert about["corpus"] == "made by a test"
    assert about["trained_tokens"] == trainer.progress.tokens
    assert about["curve"][-1]["accept_3"] == round(trainer.evaluate(3).accept_length, 4)
    core = make_core(SpecConfig("eagle3", 3, 1, 4, draft_head=str(file)))
    warm_up(core)
    assert core.info()["paths"]["drafter"]["state"] == "active"
    assert generate(core, prompts(3)) == generate(make_core(), prompts(3))


def test_a_corpus_that_grew_is_gone_on_with_where_it_is_new(
    trainer_in: Callable[[Path], tuple[Trainer, list[Conversation]]], tmp_path: Path
) -> None:
    """What was there is seen once, before what came since, wherever that stands."""
    trainer, some = trainer_in(tmp_path)
    fewer = some[:20]
    trainer.begin(fewer)
    order = [c for batch in trainer._batches(fewer, 0) for c in batch]

    def tick(progress: Progress) -> None:
        if progress.sequences == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer.run(fewer, tick, 1e9)
    trainer.save()
    grown, _ = trainer_in(tmp_path)
    mixed = [*some[50:], *fewer, *some[20:50]]
    grown.begin(mixed)
    seen = [c for batch in grown._batches(mixed, grown.progress.sequences) for c in batch]
    assert seen[:8] == order[12:]
    assert sorted(c.key for c in seen[8:]) == sorted(c.key for c in some[20:])
    grown.run(mixed, lambda progress: None, 1e9)
    assert grown.progress.sequences > 20
    again, _ = trainer_in(tmp_path)
    with pytest.raises(InvalidConfig, match="are in no --corpus"):
        again.begin(fewer)


def test_a_checkpoint_that_notes_no_corpus_is_of_the_one_that_is_there(
    trainer_in: Callable[[Path], tuple[Trainer, list[Conversation]]], tmp_path: Path
) -> None:
    trainer, some = trainer_in(tmp_path)
    trainer.begin(some)
    order = [c for batch in trainer._batches(some, 0) for c in batch]
    trainer.progress.corpora, trainer.progress.sequences = [], 40
    trainer.save()
    resumed, _ = trainer_in(tmp_path)
    resumed.begin(some)
    assert [c for batch in resumed._batches(some, 40) for c in batch] == order[40:]
    with pytest.raises(InvalidConfig, match="has seen 40 conversations"):
        trainer_in(tmp_path)[0].begin(some[:30])


def test_a_head_that_there_is_can_be_gone_on_from(
    trainer_in: Callable[[Path], tuple[Trainer, list[Conversation]]], tmp_path: Path
) -> None:
    first, some = trainer_in(tmp_path / "first")
    first.begin(some)
    first.run(some, lambda progress: None, 1e9)
    file = tmp_path / "head.safetensors"
    first.export(file, "tiny", "made by a test")
    begun = read_head(file)
    second, _ = trainer_in(tmp_path / "second")
    second.begin(some, begun)
    for name, weight in first.averaged.items():
        torch.testing.assert_close(second.averaged[name], weight, atol=2e-2, rtol=2e-2)
    second.run(some, lambda progress: None, 1e9)
    second.export(file, "tiny", "more of it", begun)
    about = read_head(file).about
    assert about["begun_with"]["trained_tokens"] == first.progress.tokens
    assert about["trained_tokens"] == second.progress.tokens
