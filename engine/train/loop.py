"""Training itself: resumable, in small steps, with a held-out curve.

State is one checkpoint file, replaced atomically; a kill loses what came since. Everything that decides the order of
data is a function of the seed and the number of sequences seen.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.errors import InvalidConfig
from engine.model.eagle3 import HeadShape
from engine.model.head_file import HeadFile, fingerprint, save_head
from engine.train.corpus import ChatFrame, Conversation
from engine.train.evaluate import Acceptance, simulate
from engine.train.head import SoftCrossEntropy, Unroll, rms
from engine.train.muon import HeadOptimiser
from engine.train.ridge import Ridge, start
from engine.train.target import LONGEST, Taught, Teacher

log = logging.getLogger(__name__)

_LEARNING_SHARE = 20  # seconds of training for each that goes into the held-out curve


@dataclass(frozen=True)
class Recipe:
    """What was found to matter at this scale is the number of optimiser steps, so batches are small.

    Attributes:
        tokens: response tokens to train on in all; the learning rate's cosine ends there.
        passes: unrolled draft passes; pass j weighs `decay` ** j.
        sequences: per optimiser step.
        rate: peak learning rate (see `HeadOptimiser`; no weight decay, clipped at 1); the output layer's is
            `head_rate` times that.
        average: of the exponential moving average that is evaluated and shipped.
    """

    tokens: int = 1_500_000
    passes: int = 3
    decay: float = 0.8
    sequences: int = 4
    rate: float = 1.2e-3
    head_rate: float = 0.3
    warmup_steps: int = 30
    last_rate: float = 0.05
    average: float = 0.98
    ridge_positions: int = 120_000
    seed: int = 0


@dataclass
class Progress:
    """Where training stands. `corpora`: keys of the conversations that each growth of the corpus brought, in order."""

    sequences: int = 0
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)
    corpora: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Bench:
    """Held-out prompts with the target's greedy answers."""

    taught: Sequence[Taught]
    prompt_lengths: Sequence[int]


class Trainer:
    """One head for one target, in a folder."""

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        shape: HeadShape,
        teacher: Teacher,
        frame: ChatFrame,
        kept: np.ndarray,
        bench: Bench,
    ) -> None:
        self._folder, self.recipe, self.shape = folder, recipe, shape
        self._teacher, self._frame, self._bench = teacher, frame, bench
        self.kept = torch.from_numpy(kept)
        self._embedding = teacher.model.embedding
        self._kept_head = teacher.model.head_rows(self.kept)
        self.progress = Progress()
        self._weights: dict[str, Tensor] = {}
        self.averaged: dict[str, Tensor] = {}
        self._checkpoint = folder / "checkpoint.pt"

    def begin(self, conversations: Sequence[Conversation], begun: HeadFile | None = None) -> None:
        """Resume from the checkpoint, or begin with a head that there is, or solve the ridge start."""
        if self._checkpoint.exists():
            state = torch.load(self._checkpoint, weights_only=True)
            if "muon" not in state["optimiser"]:
                raise InvalidConfig(f"{self._checkpoint} is of an earlier version's optimiser; name another folder")
            self._weights, self.averaged = state["weights"], state["averaged"]
            self.progress = Progress(**state["progress"])
            self._optimiser = HeadOptimiser(self._weights, self.recipe.head_rate, self._embedding.dtype)
            self._optimiser.load_state_dict(state["optimiser"])
            self._grown(conversations)
            log.info("resumed at %d response tokens", self.progress.tokens)
            return
        self._grown(conversations)
        if begun is not None:
            self._start({name: weight.float().clone() for name, weight in begun.weights.items()})
            log.info("begun with a head of %s tokens: %s", begun.about.get("trained_tokens"), self._measure())
            return
        ridge = Ridge(self.shape.hidden)
        for batch in self._batches(conversations, 0):
            for one in self._teach(batch):
                following = rms(one.hidden[1:].float() / self._final_norm())
                ridge.add(one.features[:-1], self._embedding[one.tokens[1:]], following)
            if ridge.positions >= self.recipe.ridge_positions:
                break
        self._start(start(self.shape, ridge.solve(), self._final_norm(), self._kept_head, self.recipe.seed))
        log.info("ridge start on %d positions: %s", ridge.positions, self._measure())

    def _start(self, weights: dict[str, Tensor]) -> None:
        self._weights = weights
        self.averaged = {name: w.clone() for name, w in weights.items()}
        self._optimiser = HeadOptimiser(weights, self.recipe.head_rate, self._embedding.dtype)

    def run(self, conversations: Sequence[Conversation], tick: Callable[[Progress], None], save_every_s: float) -> None:
        """Train until the recipe's tokens are used up or the conversations are."""
        saved = measured = time.monotonic()
        took = 0.0
        for batch in self._batches(conversations, self.progress.sequences):
            began = time.monotonic()
            self._step(batch)
            now = time.monotonic()
            self.progress.seconds += now - began
            tick(self.progress)
            if now - measured > max(3 * save_every_s, _LEARNING_SHARE * took):
                log.info("%s", self._measure())
                measured = time.monotonic()
                took = measured - now
            if now - saved > save_every_s:
                self.save()
                saved = time.monotonic()
            if self.progress.tokens >= self.recipe.tokens:
                break
        log.info("%s", self._measure())
        self.save()

    def evaluate(self, steps: int) -> Acceptance:
        """Of the averaged weights on the held-out answers."""
        bench = self._bench
        return simulate(
            self.shape, self.averaged, self._embedding, self.kept, bench.taught, bench.prompt_lengths, steps
        )

    def save(self) -> None:
        """Replace the checkpoint."""
        state = {
            "weights": {name: w.detach() for name, w in self._weights.items()},
            "averaged": self.averaged,
            "optimiser": self._optimiser.state_dict(),
            "progress": asdict(self.progress),
        }
        made = self._checkpoint.with_suffix(".new")
        torch.save(state, made)
        made.replace(self._checkpoint)

    def export(self, file: Path, target_name: str, corpus: str, begun: HeadFile | None = None) -> None:
        """Write the averaged weights as a head that the engine serves, with its training log.

        `corpus`: a sentence about where the conversations come from; `begun`: the head that it was begun with.
        """
        about = {
            "target": target_name,
            "target_fingerprint": fingerprint(self._teacher.model),
            "licence": "Apache-2.0",
            "corpus": corpus,
            "recipe": asdict(self.recipe),
            "trained_tokens": self.progress.tokens,
            "steps": self.progress.steps,
            "curve": self.progress.curve,
            "check": self._check(),
        }
        if begun is not None:
            about["begun_with"] = {name: begun.about.get(name) for name in ("corpus", "trained_tokens", "curve")}
        save_head(file, self.shape, self.averaged, self.kept, about)

    def _check(self) -> dict[str, object]:
        """A held-out prompt and the accept length there, for the engine's own check at start."""
        one, length = self._bench.taught[0], self._bench.prompt_lengths[0]
        measured = simulate(self.shape, self.averaged, self._embedding, self.kept, [one], [length], 3)
        return {
            "prompt": one.tokens[:length].tolist(),
            "tokens": len(one.tokens) - length,
            "accept_length": round(measured.accept_length, 3),
        }

    def _final_norm(self) -> Tensor:
        return self._teacher.model.final_norm.float()

    def _grown(self, conversations: Sequence[Conversation]) -> None:
        """Notes what has come since the last time: it is seen after all that was there then, whatever file holds it."""
        corpora = self.progress.corpora
        noted = {key for corpus in corpora for key in corpus}
        keys = list(dict.fromkeys(c.key for c in conversations))
        if missing := len(noted.difference(keys)):
            raise InvalidConfig(
                f"{self._folder}: {missing} of {len(noted)} conversations that it was begun with are in no --corpus; "
                "give every file that it was begun with, or name another folder"
            )
        if more := [key for key in keys if key not in noted]:
            corpora.append(more)
        if self.progress.sequences > len(keys):
            raise InvalidConfig(
                f"{self._folder} has seen {self.progress.sequences} conversations, and there are {len(keys)}; give "
                "every --corpus that it was begun with, or name another folder"
            )

    def _batches(self, conversations: Sequence[Conversation], done: int) -> Iterator[list[Conversation]]:
        by_key = {c.key: c for c in conversations}
        rng = np.random.default_rng(self.recipe.seed)
        order = [corpus[i] for corpus in self.progress.corpora for i in rng.permutation(len(corpus))][done:]
        for first in range(0, len(order), self.recipe.sequences):
            yield [by_key[key] for key in order[first : first + self.recipe.sequences]]

    def _teach(self, batch: Sequence[Conversation]) -> list[Taught]:
        sequences = [(*self._frame.prompt(c.user), *c.response)[:LONGEST] for c in batch]
        return self._teacher.teach(sequences)

    def _step(self, batch: Sequence[Conversation]) -> None:
        recipe, progress = self.recipe, self.progress
        taught = self._teach(batch)
        prompts = [len(self._frame.prompt(c.user)) for c in batch]
        longest = max(len(t.tokens) for t in taught)
        width = longest - 1 - recipe.passes
        if width < 1:
            progress.sequences += len(batch)
            return
        features = torch.zeros(len(batch), width, 3 * self.shape.hidden, dtype=self._embedding.dtype)
        tokens = torch.zeros(len(batch), longest, dtype=torch.int64)
        hidden = torch.zeros(len(batch), longest, self.shape.hidden, dtype=self._embedding.dtype)
        supervised = torch.zeros(len(batch), longest, dtype=torch.bool)
        for b, (one, prompt) in enumerate(zip(taught, prompts, strict=True)):
            n = len(one.tokens)
            features[b, : min(n, width)] = one.features[:width]
            tokens[b, :n], hidden[b, :n] = one.tokens, one.hidden
            supervised[b, prompt:n] = True  # positions whose token is the target's own
        count = int(supervised.sum())
        with torch.enable_grad():
            loss = self._loss(features, tokens, hidden, supervised, width)
            self._optimiser.zero_grad()
            loss.backward()
        done = progress.tokens / recipe.tokens
        rate = recipe.rate * min(1.0, (progress.steps + 1) / recipe.warmup_steps)
        rate *= recipe.last_rate + (1 - recipe.last_rate) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        self._optimiser.step(rate)
        average = min(recipe.average, (progress.steps + 1) / (progress.steps + 10))
        with torch.no_grad():
            for name, mean in self.averaged.items():
                mean.lerp_(self._weights[name].detach(), 1 - average)
        progress.sequences += len(batch)
        progress.steps += 1
        progress.tokens += count
        progress.loss = float(loss.detach())

    def _loss(self, features: Tensor, tokens: Tensor, hidden: Tensor, supervised: Tensor, width: int) -> Tensor:
        """Mean over supervised rows, summed over passes with their weights."""
        # What the target predicts from a position is asked for by every pass: worked out once.
        predicts = torch.nn.functional.pad(supervised[:, 1:], (0, 1))
        taught = (hidden[predicts] @ self._kept_head.t()).float().softmax(-1)
        index = torch.zeros(predicts.shape, dtype=torch.int64)
        index[predicts] = torch.arange(len(taught))
        unroll = Unroll(self.shape, self._weights, features)
        total = torch.zeros(())
        for j in range(self.recipe.passes):
            normed = unroll.step(self._embedding[tokens[:, 1 + j : 1 + j + width]])
            # Row i of pass j predicts token i + 2 + j, which the target predicts from position i + 1 + j.
            asked = slice(1 + j, 1 + j + width)
            rows = predicts[:, asked]
            weight = torch.full((int(rows.sum()),), self.recipe.decay**j / max(1, int(rows.sum())))
            teacher = taught[index[:, asked][rows]]
            total = total + SoftCrossEntropy.apply(normed[rows], self._weights["lm_head"], teacher, weight)
        return total

    def _measure(self) -> str:
        three, five = self.evaluate(3), self.evaluate(5)
        point = {
            "tokens": self.progress.tokens,
            "seconds": round(self.progress.seconds, 1),
            "loss": round(self.progress.loss, 4),
            "accept_3": round(three.accept_length, 4),
            "accept_5": round(five.accept_length, 4),
            **{f"depth_{i + 1}": round(p, 4) for i, p in enumerate(five.by_depth)},
        }
        self.progress.curve.append(point)
        with (self._folder / "curve.jsonl").open("a") as file:
            file.write(json.dumps(point) + "\n")
        return json.dumps(point)
