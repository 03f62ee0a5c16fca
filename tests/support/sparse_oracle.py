"""DeepSeek-V3.2 in float64 NumPy: the oracle's model with attention to selected tokens only.

It follows the V3.2 report and DeepSeek's inference code, and shares no code with the package. Every
query is treated by itself.
"""

from typing import Any

import numpy as np

from .oracle import Array, Oracle, rotate, softmax


class SparseOracle(Oracle):
    """`Oracle` of a config with `index_topk`. `selected` has the tokens that each query attended
    to, and `margins` the difference between its worst selected score and the best other one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.selected: dict[str, dict[tuple[int, int], set[int]]] = {}
        self.margins: dict[str, Array] = {}

    def index_scores(self, prefix: str, x: Array, q_latent: Array) -> Array:
        """Returns I[b, t, s] = sum_j w_tj relu(q_tj . k_s) J^-1/2 D^-1/2, without a mask."""
        heads, rope = self.config["index_n_heads"], self.config["qk_rope_head_dim"]
        batch, length, _ = x.shape
        cos, sin = self._angles(length)
        interleaved = self.config.get("indexer_rope_interleave", False)

        def rotate_first(y: Array, cos: Array, sin: Array) -> Array:
            first_dims = y[..., :rope]
            if interleaved:
                return np.concatenate([rotate(first_dims, cos, sin), y[..., rope:]], axis=-1)
            first, second = np.split(first_dims, 2, axis=-1)
            parts = [first * cos - second * sin, second * cos + first * sin, y[..., rope:]]
            return np.concatenate(parts, axis=-1)

        q = self._linear(f"{prefix}.wq_b", q_latent).reshape(batch, length, heads, -1)
        q = rotate_first(q, cos[:, None], sin[:, None])
        k = self._linear(f"{prefix}.wk", x)
        centred = k - k.mean(axis=-1, keepdims=True)
        k = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-6)
        k = self.tensors[f"{prefix}.k_norm.weight"] * k + self.tensors[f"{prefix}.k_norm.bias"]
        k = rotate_first(k, cos, sin)
        weights = self._linear(f"{prefix}.weights_proj", x) * (heads * q.shape[-1]) ** -0.5
        scores = np.zeros((batch, length, length))
        for j in range(heads):
            products = np.einsum("btd,bsd->bts", q[:, :, j], k)
            scores += weights[..., j, None] * np.maximum(products, 0)
        return scores

    def _queries_and_latents(self, prefix: str, x: Array) -> tuple[Array, Array, Array]:
        """Returns absorbed queries [B, T, H, C + R], latents [B, T, C + R], and query latents."""
        config = self.config
        heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
        nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
        batch, length, _ = x.shape
        q_latent = self._linear(f"{prefix}.q_a_proj", x)
        q_latent = self._norm(f"{prefix}.q_a_layernorm", q_latent, self.latent_eps)
        q = self._linear(f"{prefix}.q_b_proj", q_latent).reshape(batch, length, heads, -1)
        cos, sin = self._angles(length)
        q_rope = rotate(q[..., nope:], cos[:, None], sin[:, None])
        down = self._linear(f"{prefix}.kv_a_proj_with_mqa", x)
        c = self._norm(f"{prefix}.kv_a_layernorm", down[..., :rank], self.latent_eps)
        latent = np.concatenate([c, rotate(down[..., rank:], cos, sin)], axis=-1)
        up = self.tensors[f"{prefix}.kv_b_proj.weight"].reshape(heads, nope + value, rank)
        folded = np.einsum("bthn,hnc->bthc", q[..., :nope], up[:, :nope])
        return np.concatenate([folded, q_rope], axis=-1), latent, q_latent

    def attention_scores(self, prefix: str, x: Array) -> tuple[Array, Array]:
        """Returns the scores of attention [B, T, H, S] and of its indexer [B, T, S], unmasked."""
        queries, latent, q_latent = self._queries_and_latents(prefix, x)
        scores = self.scale * np.einsum("bthc,bsc->bths", queries, latent)
        return scores, self.index_scores(f"{prefix}.indexer", x, q_latent)

    def _attention(self, prefix: str, x: Array, absorbed: bool) -> tuple[Array, Array]:
        del absorbed  # each query reads its own latents
        heads, rank = self.config["num_attention_heads"], self.config["kv_lora_rank"]
        batch, length, _ = x.shape
        queries, latent, q_latent = self._queries_and_latents(prefix, x)
        index, topk = self.index_scores(f"{prefix}.indexer", x, q_latent), self.config["index_topk"]
        out = np.zeros((batch, length, heads, rank))
        selected: dict[tuple[int, int], set[int]] = {}
        margins = np.full((batch, length), np.inf)
        for b, t in np.ndindex(batch, length):
            visible = index[b, t, : t + 1]
            order = np.argsort(-visible, kind="stable")  # ties go to the earlier token
            chosen = np.sort(order[:topk])
            if len(order) > topk:
                margins[b, t] = visible[order[topk - 1]] - visible[order[topk]]
            selected[b, t] = set(chosen.tolist())
            probabilities = softmax(self.scale * queries[b, t] @ latent[b, chosen].T)
            out[b, t] = probabilities @ latent[b, chosen, :rank]
        self.selected[prefix], self.margins[prefix] = selected, margins
        up = self.tensors[f"{prefix}.kv_b_proj.weight"].reshape(heads, -1, rank)
        w_uv = up[:, self.config["qk_nope_head_dim"] :]
        values = np.einsum("bthc,hvc->bthv", out, w_uv)
        return self._linear(f"{prefix}.o_proj", values.reshape(batch, length, -1)), latent
