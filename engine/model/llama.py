"""Llama, Qwen2 and Qwen3: pre-norm layers with rotary attention and a gated MLP, written once over `Ops`."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.collectives.base import Group
from engine.memory.pool import KVPool
from engine.model.shard import Sizes, shards
from engine.model.weights import Weights
from engine.ops.base import Layer, Linear, Ops, Stack, View, rows_of
from engine.ops.grouped import GROUP, KINDS, stack


class Llama:
    """A loaded model, or one rank's part of it. `forward` is the only thing that touches the cache; it holds no state
    of requests."""

    def __init__(
        self,
        weights: Weights,
        ops: Ops,
        dtype: torch.dtype,
        context_length: int,
        kind: str = "auto",
        group: Group | None = None,
        device: torch.device | None = None,
    ) -> None:
        """`kind`: of the linear layers' weights, see `Ops.linear`; the output layer is int8 where they are int4.

        Raises:
            InvalidConfig: the model cannot be cut into as many parts as the group has ranks.
        """
        config = weights.config
        self.config, self.ops, self.dtype, self.kind = config, ops, dtype, kind
        self.group, self.device = group or Group(), device or torch.device("cpu")
        h, d = config.hidden, config.head_dim
        sizes = Sizes(h, config.q_heads, config.kv_heads, d, config.intermediate, config.vocab)
        self.shard = shard = shards(sizes, self.group.ranks)[self.group.rank]
        self.q_heads, self.kv_heads = len(shard.q_heads), len(shard.kv_heads)
        q_rows, kv_rows = (range(heads.start * d, heads.stop * d) for heads in (shard.q_heads, shard.kv_heads))

        def take(name: str, *shape: int) -> Tensor:
            return weights.take(f"{name}.weight", shape, dtype).to(self.device)

        def take_bias(name: str, size: int) -> Tensor:
            return weights.take(f"{name}.bias", (size,), dtype).to(self.device)

        def rows(*parts: tuple[str, int, range], columns: int, bias: bool) -> Linear:
            """Of these rows of weights [size, columns], one below the other: name, size, rows."""
            biases = [take_bias(name, n)[at.start : at.stop] for name, n, at in parts if bias]
            shift = torch.cat(biases) if bias else None
            if kind in KINDS:
                found = [weights.take_grouped(f"{name}.weight", (size, columns), kind) for name, size, _ in parts]
                numbers = [
                    w.rows(torch.arange(at.start, at.stop)) for w, (*_, at) in zip(found, parts, strict=True) if w
                ]
                if len(numbers) == len(parts):
                    return ops.linear(stack(numbers), shift)
            taken = [take(name, size, columns)[at.start : at.stop] for name, size, at in parts]
            return ops.linear(torch.cat(taken), shift, weights=kind)

        def columns(name: str, size: int, at: range, bias: bool) -> Linear:
            """Of these columns of a weight [H, size]; the ranks' results add up to the layer's."""
            shift = take_bias(name, h) if bias else None
            if self.group.rank:
                shift = None  # it is added once
            if kind in KINDS and at.start % GROUP == 0 and (at.stop % GROUP == 0 or at.stop == size):
                numbers = weights.take_grouped(f"{name}.weight", (h, size), kind)
                if numbers is not None:
                    return ops.linear(numbers.columns_of(at), shift)
            taken = take(name, h, size)[:, at.start : at.stop]
            return ops.linear(taken.contiguous(), shift, weights=kind)

        q, kv, inner = config.q_heads * d, config.kv_heads * d, config.intermediate

        self._embedding = take("model.embed_tokens", config.vocab, h)
        layers = []
        for i in range(config.layers):
            at = f"model.layers.{i}"
            attention, mlp = f"{at}.self_attn", f"{at}.mlp"
            wanted = (("q", q, q_rows), ("k", kv, kv_rows), ("v", kv, kv_rows))
            inputs = [(f"{attention}.{part}_proj", size, at) for part, size, at in wanted]
            gates = [(f"{mlp}.{part}_proj", inner, shard.inner) for part in ("gate", "up")]
            layers.append(
                Layer(
                    attention_norm=take(f"{at}.input_layernorm", h),
                    qkv=rows(*inputs, columns=h, bias=config.qkv_bias),
                    head_norms=(take(f"{attention}.q_norm", d), take(f"{attention}.k_norm", d))
                    if config.qk_norm
                    else None,
                    out=columns(f"{attention}.o_proj", q, q_rows, config.out_bias),
                    mlp_norm=take(f"{at}.post_attention_layernorm", h),
                    gate_up=rows(*gates, columns=h, bias=config.mlp_bias),
                    down=columns(f"{mlp}.down_proj", inner, shard.inner, config.mlp_bias),
                )
            )
        self._norm = take("model.norm", h)
        mine = slice(shard.vocab.start, shard.vocab.stop)
        self._head_weight = self._embedding if config.tied else take("lm_head", config.vocab, h)
        head_kind = "int8" if kind in KINDS else kind
        head_name = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
        numbers = weights.take_grouped(head_name, (config.vocab, h), head_kind)
        head = (
            self._head_weight[mine].contiguous() if numbers is None else numbers.rows(torch.arange(config.vocab)[mine])
        )
        if self.group.ranks > 1 and not config.tied:
            self._head_weight = self._head_weight[:0]  # only training wants rows of it, and it has one rank
        self._head = ops.linear(head, as_float=True, weights=head_kind)
        self.identity = weights.identity()
        cos, sin = config.rope.tables(d, context_length)
        self._rope = (cos.to(self.device), sin.to(self.device))
        self._layers = tuple(layers)
        self._fused = ops.fuse(
            Stack(self._layers, self._norm, self._rope, config.rms_eps, self.q_heads, self.kv_heads, d, self.group)
        )

    def new_pool(self, pages: int, page_size: int) -> KVPool:
        """A cache for its layers, or for this rank's part of them."""
        return KVPool(
            self.config.layers, pages, page_size, self.kv_heads, self.config.head_dim, self.dtype, self.device
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token over all layers, on this rank."""
        return 2 * self.config.layers * self.kv_heads * self.config.head_dim * self.dtype.itemsize

    def summary(self) -> dict[str, int]:
        """What this rank has of the model."""
        shard = self.shard
        return {
            "q_heads": self.q_heads,
            "kv_heads": self.kv_heads,
            "mlp_columns": len(shard.inner),
            "vocab_rows": len(shard.vocab),
        }

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
        return self.group.all_gather(self._head(hidden), self.shard.widths)

    def hidden(self, view: View, pool: KVPool, layers: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """Final normed hidden states [T, H], and the outputs of these layers side by side, [T, len(layers) H].

        A layer's output is the residual stream behind it, before the next normalisation (EAGLE-3's features).
        """
        ops, config, eps = self.ops, self.config, self.config.rms_eps
        view = view.on(self.device)
        residual = rows_of(self._embedding, view.tokens)
        if self._fused is not None:
            return self._fused(residual, view, *pool.tensors, layers)
        features = torch.empty(len(residual), len(layers) * config.hidden, dtype=self.dtype, device=self.device)
        normed = ops.rms_norm(residual, self._layers[0].attention_norm, eps)
        following = [layer.attention_norm for layer in self._layers[1:]] + [self._norm]
        for i, layer in enumerate(self._layers):
            k_cache, v_cache = pool.layer(i)
            qkv = layer.qkv(normed)
            if layer.head_norms is not None:
                self._norm_heads(qkv, *layer.head_norms)
            ops.rope_store(qkv, view, self._rope, k_cache, v_cache, self.q_heads)
            mixed = layer.out(ops.attention(qkv, view, k_cache, v_cache, self.q_heads))
            normed = ops.add_rms_norm(self.group.all_reduce(mixed), residual, layer.mlp_norm, eps)
            added = self.group.all_reduce(layer.down(ops.silu_mul(layer.gate_up(normed))))
            normed = ops.add_rms_norm(added, residual, following[i], eps)
            if i in layers:
                at = layers.index(i) * config.hidden
                features[:, at : at + config.hidden] = residual
        return normed, features

    def _norm_heads(self, qkv: Tensor, q_norm: Tensor, k_norm: Tensor) -> None:
        """Normalise each head of the queries and the keys in qkv [T, (Q + 2G) D], in place."""
        d = self.config.head_dim
        q, kv = self.q_heads * d, self.kv_heads * d
        for part, weight in ((qkv[:, :q], q_norm), (qkv[:, q : q + kv], k_norm)):
            heads = part.reshape(-1, d)
            part.copy_(self.ops.rms_norm(heads, weight, self.config.rms_eps).view(part.shape))
