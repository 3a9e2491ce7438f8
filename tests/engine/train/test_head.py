"""The unrolled passes are what drafting one token at a time computes; the fused loss has the true gradient."""

from __future__ import annotations

import copy
import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.model.eagle3 import HeadShape
from engine.train.corpus import Conversation, append, kept_vocabulary, read
from engine.train.evaluate import simulate
from engine.train.head import SoftCrossEntropy, Unroll
from engine.train.muon import HeadOptimiser, orthogonalised
from engine.train.ridge import Ridge, start
from engine.train.target import Taught

SHAPE = HeadShape(
    hidden=32,
    q_heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate=48,
    draft_vocab=20,
    rope_theta=10000.0,
    layers=(1, 2, 3),
)
VOCAB = 40


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        name: torch.ones(size) if len(size) == 1 else torch.randn(size) * 0.3
        for name, size in SHAPE.parameters().items()
    }


def draft_one_by_one(w: dict[str, torch.Tensor], features: torch.Tensor, embedded: torch.Tensor, depth: int):
    """The plain way: positions 0 … n - 1 with true features, then `depth` - 1 more on the head's own output."""
    n = len(features)
    first = Unroll(SHAPE, w, features[None])
    outputs = [first.step(embedded[None, :n])[0, -1]]
    for _ in range(1, depth):
        # The last row of a pass over exactly n rows is the draft that hangs at position n - 1.
        j = len(outputs)
        outputs.append(first.step(embedded[None, j : j + n])[0, -1])
    return outputs


def test_a_row_does_not_see_what_comes_after_it() -> None:
    features, embedded = torch.randn(12, 96).bfloat16(), torch.randn(16, 32).bfloat16()
    w = weights()
    whole = Unroll(SHAPE, w, features[None])
    passes = [whole.step(embedded[None, j : j + 12])[0] for j in range(4)]
    for n in (1, 5, 12):
        for j, alone in enumerate(draft_one_by_one(w, features[:n], embedded, 4)):
            torch.testing.assert_close(passes[j][n - 1], alone, atol=3e-2, rtol=3e-2)


def test_the_fused_loss_equals_autograd() -> None:
    hidden = torch.randn(9, 32).bfloat16().requires_grad_()
    head = torch.randn(20, 32).bfloat16().float().requires_grad_()
    teacher, weight = torch.randn(9, 20) * 2, torch.rand(9)
    logits = hidden.float() @ head.t()
    plain = (-(teacher.softmax(-1) * logits.log_softmax(-1)).sum(-1) * weight).sum()
    expected = torch.autograd.grad(plain, (hidden, head))
    fused = SoftCrossEntropy.apply(hidden, head, teacher.softmax(-1), weight)
    found = torch.autograd.grad(fused, (hidden, head))
    assert fused.item() == pytest.approx(plain.item(), rel=2e-2)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_a_step_has_all_directions_of_the_gradient_at_one_length(shape: tuple[int, int]) -> None:
    torch.manual_seed(3)
    gradient = torch.randn(shape) @ torch.diag(torch.logspace(0, -1, shape[1]))
    left, sizes, right = torch.linalg.svd(gradient, full_matrices=False)
    made = orthogonalised(gradient)
    lengths = (left.t() @ made @ right.t()).diagonal()
    assert lengths[sizes > 0.05 * sizes[0]].min() > 0.6
    assert lengths.max() < 1.3
    assert orthogonalised(torch.zeros(shape)).abs().max() == 0


def test_an_optimiser_that_was_saved_goes_on_as_one_that_was_not() -> None:
    def gradients(w: dict[str, torch.Tensor], seed: int) -> None:
        torch.manual_seed(seed)
        for weight in w.values():
            weight.grad = torch.randn_like(weight)

    w = {name: tensor.detach().float().clone() for name, tensor in weights().items()}
    optimiser = HeadOptimiser(w, 0.3)
    for seed in range(3):
        gradients(w, seed)
        optimiser.step(1e-2)
    saved = {name: tensor.detach().clone() for name, tensor in w.items()}
    resumed = HeadOptimiser(saved, 0.3)
    resumed.load_state_dict(copy.deepcopy(optimiser.state_dict()))
    for kept, its in ((w, optimiser), (saved, resumed)):
        gradients(kept, 9)
        its.step(5e-3)
    for name, weight in w.items():
        assert torch.equal(weight, saved[name]), name


def test_the_ridge_start_predicts_what_is_linear_in_its_inputs() -> None:
    torch.manual_seed(1)
    shape = HeadShape(**{**SHAPE.__dict__, "draft_vocab": VOCAB})
    embedding = torch.randn(VOCAB, 32).bfloat16()
    tokens, features = torch.randint(0, VOCAB, (600,)), torch.randn(600, 96).bfloat16()
    truth = torch.randn(96, 32) * 0.1

    def following(rows: slice) -> torch.Tensor:
        return torch.nn.functional.normalize(features[rows].float() @ truth, dim=-1) * 32**0.5

    ridge = Ridge(32)
    ridge.add(features[:500], embedding[tokens[:500]], following(slice(500)))
    w = start(shape, ridge.solve(), torch.ones(32), embedding, seed=0)
    hidden = Unroll(shape, w, features[None, 500:]).step(embedding[tokens[500:]][None])[0]
    ours = (hidden.float() @ embedding.float().t()).argmax(-1)
    true = (following(slice(500, 600)) @ embedding.float().t()).argmax(-1)
    assert (ours == true).float().mean() > 0.5


def test_simulated_rounds_count_what_a_perfect_and_a_hopeless_head_would_emit() -> None:
    tokens = torch.full((30,), 7)
    taught = Taught(tokens, torch.randn(30, 96).bfloat16(), torch.randn(30, 32).bfloat16())
    embedding, kept = torch.randn(VOCAB, 32).bfloat16(), torch.arange(20)
    w = weights()
    for favourite, expected in ((7, 4.0), (3, 1.0)):
        w["lm_head"] = torch.zeros(20, 32)
        w["final_norm"] = torch.zeros(32)
        w["final_norm"][0] = 0.0
        # With a zeroed norm all logits are equal and the first id wins; a vocabulary whose first id is it makes it so.
        found = simulate(SHAPE, w, embedding, torch.roll(kept, -favourite), [taught], [5], steps=3)
        assert found.accept_length == pytest.approx(expected, abs=0.4)
        assert found.rounds > 0


def test_a_corpus_survives_a_kill_in_the_middle_of_a_write(tmp_path: Path) -> None:
    some = [Conversation((1, 2, i), tuple(range(i, i + 10)), 0.0, "chat") for i in range(5)]
    file = tmp_path / "corpus.jsonl.gz"
    append(file, some[:3], "test")
    whole = file.stat().st_size
    append(file, some[3:], "test")
    assert list(read([file])) == some
    file.write_bytes(file.read_bytes()[: whole + 20])
    assert list(read([file]))[:3] == some[:3]
    assert gzip.decompress(file.read_bytes()[:whole])


def test_the_kept_vocabulary_is_the_most_frequent_tokens_in_order() -> None:
    conversations = [Conversation((1,), (5, 5, 5, 9, 9, 30), 0.0, "")]
    assert kept_vocabulary(conversations, 2).tolist() == [5, 9]
    assert kept_vocabulary(conversations, 5).tolist() == [0, 1, 5, 9, 30]
    assert np.all(np.diff(kept_vocabulary(conversations, 8)) > 0)


def test_a_loop_is_recognised() -> None:
    assert Conversation((1,), tuple([4, 5, 6] * 30), 0.0, "").loops
    assert not Conversation((1,), tuple(range(100)), 0.0, "").loops
