"""Llama, Qwen2 and Qwen3: pre-norm layers with rotary attention and a gated MLP, written once over `Ops`."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.memory.pool import KVPool
from engine.model.weights import Weights
from engine.ops.base import Layer, Linear, Ops, Stack, View, rows_of
from engine.ops.grouped import KINDS, stack


class Llama:
    """A loaded model. `forward` is the only thing that touches the cache; it holds no state of requests."""

    def __init__(self, weights: Weights, ops: Ops, dtype: torch.dtype, context_length: int, kind: str = "auto") -> None:
        """`kind`: of the linear layers' weights, see `Ops.linear`; the output layer is int8 where they are int4."""
        config = weights.config
        self.config, self.ops, self.dtype, self.kind = config, ops, dtype, kind
        h, d = config.hidden, config.head_dim
        q, kv, inner = config.q_heads * d, config.kv_heads * d, config.intermediate

        def take(name: str, *shape: int) -> Tensor:
            return weights.take(f"{name}.weight", shape, dtype)

        def linear(*parts: tuple[str, int], columns: int, bias: bool) -> Linear:
            """Of weights [size, columns] one below the other, by name and size."""
            shift = torch.cat([weights.take(f"{name}.bias", (n,), dtype) for name, n in parts]) if bias else None
            if kind in KINDS:
                shapes = [(f"{name}.weight", (size, columns)) for name, size in parts]
                found = [weights.take_grouped(name, shape, kind) for name, shape in shapes]
                numbers = [weight for weight in found if weight is not None]
                if len(numbers) == len(parts):
                    return ops.linear(stack(numbers), shift)
            return ops.linear(torch.cat([take(name, size, columns) for name, size in parts]), shift, weights=kind)

        self._embedding = take("model.embed_tokens", config.vocab, h)
        layers = []
        for i in range(config.layers):
            at = f"model.layers.{i}"
            attention, mlp = f"{at}.self_attn", f"{at}.mlp"
            inputs = [(f"{attention}.{part}_proj", size) for part, size in (("q", q), ("k", kv), ("v", kv))]
            gates = [(f"{mlp}.{part}_proj", inner) for part in ("gate", "up")]
            layers.append(
                Layer(
                    attention_norm=take(f"{at}.input_layernorm", h),
                    qkv=linear(*inputs, columns=h, bias=config.qkv_bias),
                    head_norms=(take(f"{attention}.q_norm", d), take(f"{attention}.k_norm", d))
                    if config.qk_norm
                    else None,
                    out=linear((f"{attention}.o_proj", h), columns=q, bias=config.out_bias),
                    mlp_norm=take(f"{at}.post_attention_layernorm", h),
                    gate_up=linear(*gates, columns=h, bias=config.mlp_bias),
                    down=linear((f"{mlp}.down_proj", h), columns=inner, bias=config.mlp_bias),
                )
            )
        self._norm = take("model.norm", h)
        self._head_weight = self._embedding if config.tied else take("lm_head", config.vocab, h)
        head_kind = "int8" if kind in KINDS else kind
        head_name = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
        numbers = weights.take_grouped(head_name, (config.vocab, h), head_kind)
        head = self._head_weight if numbers is None else numbers
        self._head = ops.linear(head, as_float=True, weights=head_kind)
        self._rope = config.rope.tables(d, context_length)
        self._layers = tuple(layers)
        self._fused = ops.fuse(
            Stack(self._layers, self._norm, self._rope, config.rms_eps, config.q_heads, config.kv_heads, d)
        )

    @property
    def embedding(self) -> Tensor:
        """Input embeddings, [V, H]: shared with drafters, read only."""
        return self._embedding

    @property
    def final_norm(self) -> Tensor:
        """Weight of the last normalisation, [H]."""
        return self._norm

    def head_rows(self, ids: Tensor) -> Tensor:
        """Rows of the output layer for these token ids, [n, H]."""
        return self._head_weight[ids]

    def forward(self, view: View, pool: KVPool) -> Tensor:
        """Logits, float32 [R, V], of the view's logit rows; keys and values of all rows go to the pool."""
        hidden, _ = self.hidden(view, pool)
        return self.logits(rows_of(hidden, view.logit_rows))

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 [R, V] of final normed hidden states [R, H]."""
        return self._head(hidden)

    def hidden(self, view: View, pool: KVPool, layers: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """Final normed hidden states [T, H], and the outputs of these layers side by side, [T, len(layers) H].

        A layer's output is the residual stream behind it, before the next normalisation (EAGLE-3's features).
        """
        ops, config, eps = self.ops, self.config, self.config.rms_eps
        residual = rows_of(self._embedding, view.tokens)
        if self._fused is not None:
            return self._fused(residual, view, *pool.tensors, layers)
        features = torch.empty(len(residual), len(layers) * config.hidden, dtype=self.dtype)
        normed = ops.rms_norm(residual, self._layers[0].attention_norm, eps)
        following = [layer.attention_norm for layer in self._layers[1:]] + [self._norm]
        for i, layer in enumerate(self._layers):
            k_cache, v_cache = pool.layer(i)
            qkv = layer.qkv(normed)
            if layer.head_norms is not None:
                self._norm_heads(qkv, *layer.head_norms)
            ops.rope_store(qkv, view, self._rope, k_cache, v_cache, config.q_heads)
            mixed = layer.out(ops.attention(qkv, view, k_cache, v_cache, config.q_heads))
            normed = ops.add_rms_norm(mixed, residual, layer.mlp_norm, eps)
            added = layer.down(ops.silu_mul(layer.gate_up(normed)))
            normed = ops.add_rms_norm(added, residual, following[i], eps)
            if i in layers:
                at = layers.index(i) * config.hidden
                features[:, at : at + config.hidden] = residual
        return normed, features

    def _norm_heads(self, qkv: Tensor, q_norm: Tensor, k_norm: Tensor) -> None:
        """Normalise each head of the queries and the keys in qkv [T, (Q + 2G) D], in place."""
        d = self.config.head_dim
        q, kv = self.config.q_heads * d, self.config.kv_heads * d
        for part, weight in ((qkv[:, :q], q_norm), (qkv[:, q : q + kv], k_norm)):
            heads = part.reshape(-1, d)
            part.copy_(self.ops.rms_norm(heads, weight, self.config.rms_eps).view(part.shape))
