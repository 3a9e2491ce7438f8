"""`engine train-head`: from a corpus of the target's own conversations to a draft head."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from engine.build import Core, build
from engine.cache import cache_dir
from engine.config import EngineConfig
from engine.errors import InvalidConfig
from engine.model.eagle3 import HeadShape
from engine.model.head_file import load_head
from engine.model.source import resolve
from engine.ops.native import cpu_flags
from engine.text.tokenizer import Tokenizer, load_tokenizer
from engine.train.corpus import ChatFrame, Conversation, kept_vocabulary, read
from engine.train.generate import generate
from engine.train.loop import Bench, Recipe, Trainer
from engine.train.loop import Progress as Standing
from engine.train.target import Taught, Teacher, answer, feature_layers

log = logging.getLogger(__name__)

_SAVE_EVERY_S = 60.0
_BENCH_PROMPTS = 48
_BENCH_TOKENS = 200


def train_head(
    model: str,
    corpus: Sequence[Path],
    folder: Path | None,
    held_out: Path | None,
    draft_vocab: int,
    intermediate: int,
    recipe: Recipe,
    threads: int | None,
    generate_tokens: int = 0,
    begin_with: Path | None = None,
) -> Path:
    """Train, or go on with, the head in `folder`; returns the finished head, which `--draft-head` serves.

    `generate_tokens` response tokens of the target's own are made first, and kept in the folder beside the corpus. With
    `begin_with`, a head for this target, training goes on from its weights and keeps its shape and vocabulary.

    Raises:
        InvalidConfig: no corpus, or a folder that holds a head of another recipe.
        ModelBroken: `begin_with` is no head for this target.
    """
    # torch multiplies bfloat16 fast only with these instructions; elsewhere it takes several times float32's time.
    dtype = "bfloat16" if cpu_flags() & {"amx_bf16", "avx512_bf16"} else "float32"
    core = build(EngineConfig(model=model, dtype=dtype, threads=threads, max_running_requests=96))
    source = resolve(model)
    begun = None if begin_with is None else load_head(begin_with, core.model, source.name)
    tokenizer = load_tokenizer(source)
    frame = ChatFrame(tokenizer)
    folder = folder or cache_dir() / "heads" / source.name
    folder.mkdir(parents=True, exist_ok=True)
    own = folder / "generated.jsonl.gz"
    if generate_tokens:
        _generate(core, frame, own, generate_tokens, tokenizer.stop_token_ids)
    corpus = [*corpus, *([own] if own.exists() else [])]
    everything = [c for c in read(corpus) if not c.loops and len(c.response) > 8]
    train = [c for c in everything if not c.held_out]
    if not train:
        raise InvalidConfig(
            "there is no conversation to train on; give --corpus FILE, or --generate N for the target's own"
        )
    shape = core.model.config
    head = HeadShape(
        hidden=shape.hidden,
        q_heads=shape.q_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate=intermediate,
        draft_vocab=draft_vocab,
        rope_theta=shape.rope.theta,
        layers=feature_layers(shape.layers),
    )
    settings: dict[str, object] = {
        "head": head.to_dict(),
        "recipe": asdict(replace(recipe, tokens=0)),
        "model": source.name,
    }
    if begun is not None:
        head = begun.shape
        settings |= {"head": head.to_dict(), "begun_with": begun.identity()}
    kept = _kept(folder, train, head) if begun is None else begun.hot.numpy()
    _same_recipe(folder, settings)
    responses = sum(len(c.response) for c in train)
    covered = float(np.isin(np.concatenate([c.response for c in everything if c.held_out]), kept).mean())
    log.info("%d conversations, %d response tokens; held-out coverage %.4f", len(train), responses, covered)
    teacher = Teacher(core, head.layers)
    prompts = _held_out_prompts(held_out, everything, frame, tokenizer)
    answers = []
    for first in range(0, len(prompts), 32):
        answers += answer(core, prompts[first : first + 32], _BENCH_TOKENS, tokenizer.stop_token_ids, 0.0, 0)
    taught = []
    for first in range(0, len(prompts), 8):
        batch = [(*p, *a) for p, a in zip(prompts[first : first + 8], answers[first : first + 8], strict=True)]
        taught += [_kept_copy(one) for one in teacher.teach(batch)]
    trainer = Trainer(folder, recipe, head, teacher, frame, kept, Bench(taught, [len(p) for p in prompts]))
    trainer.begin(train, begun)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=not os.isatty(2)) as bar:
        task = bar.add_task("training", total=recipe.tokens, completed=trainer.progress.tokens)

        def tick(standing: Standing) -> None:
            bar.update(task, completed=standing.tokens, description=f"loss {standing.loss:.3f}")

        trainer.run(train, tick, _SAVE_EVERY_S)
    made = folder / "head.safetensors"
    sources = ", ".join(sorted(file.name for file in corpus)) or "made by this command"
    trainer.export(made, source.name, f"{responses} response tokens of the target's own answers ({sources})", begun)
    return made


def _generate(core: Core, frame: ChatFrame, file: Path, tokens: int, stop: Sequence[int]) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=not os.isatty(2)) as bar:
        task = bar.add_task("the target writes its corpus", total=tokens)
        made = generate(core, frame, file, tokens, stop, lambda so_far: bar.update(task, completed=so_far))
    log.info("%s holds %d response tokens", file, made)


def _kept_copy(one: Taught) -> Taught:
    """Slices of one large tensor would keep all of it alive."""
    return Taught(one.tokens.clone(), one.features.clone(), one.hidden.clone())


def _kept(folder: Path, train: Sequence[Conversation], head: HeadShape) -> np.ndarray:
    """The reduced vocabulary is fixed once: a corpus that grows must not move the head's outputs."""
    file = folder / "kept.npy"
    if file.exists():
        kept = np.load(file)
        if len(kept) != head.draft_vocab:
            raise InvalidConfig(f"{folder} holds a head with {len(kept)} draft tokens, not {head.draft_vocab}")
        return kept
    kept = kept_vocabulary(train, head.draft_vocab)
    np.save(file, kept)
    return kept


def _same_recipe(folder: Path, settings: dict[str, object]) -> None:
    file = folder / "settings.json"
    if file.exists():
        before = json.loads(file.read_text())
        if before != json.loads(json.dumps(settings)):
            raise InvalidConfig(f"{folder} holds a head begun with other settings ({before}); name another folder")
    else:
        file.write_text(json.dumps(settings))


def _held_out_prompts(
    file: Path | None, everything: Sequence[Conversation], frame: ChatFrame, tokenizer: Tokenizer
) -> list[tuple[int, ...]]:
    if file is not None:
        texts = [json.loads(line)["text"] for line in file.read_text().splitlines() if line]
        return [frame.prompt(tokenizer.encode(text, add_special=False)) for text in texts][:_BENCH_PROMPTS]
    users = dict.fromkeys(c.user for c in everything if c.held_out)
    return [frame.prompt(user) for user in list(users)[:_BENCH_PROMPTS]]
