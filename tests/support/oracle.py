"""DeepSeek V2/V3 in float64 NumPy: the independent implementation that tests compare with.

Written from the formulas of the V2 report (arXiv 2405.04434), the V3 report (arXiv 2412.19437) and
the YaRN paper (arXiv 2309.00071), with the keys of the published config.json and the published
tensor names. It shares no code with the packages under test and does not import JAX. It is
written for clarity, not for speed.

Letters: B batch, T queries, S keys (= T here), D hidden, H heads, N nope, R rope, V value, C latent
rank, E experts, K experts per token, W vocabulary. Linear weights are [out, in] as published:
y = x W^T.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Config = dict[str, Any]


@dataclass
class OracleOutput:
    """Result of one forward pass of `Oracle`. All real arrays are float64."""

    logits: Array
    """[B, T, W]."""
    mtp_logits: tuple[Array, ...]
    """[B, T-1-k, W] of each MTP layer k. Position i predicts token i + 2 + k."""
    routing: list[npt.NDArray[np.int64]]
    """Selected experts [B, T, K] of each MoE layer of the main model, in ascending order."""
    hidden: Array
    """[B, T, D], after the final norm."""
    latents: list[Array]
    """Content of a latent cache, [B, T, C + R], for each layer of the main model: the normed
    latent, then the shared rope key, rotated, in half layout (`rotate`)."""
    mtp_latents: tuple[Array, ...]
    """[B, T-1-k, C + R] of each MTP layer, rotated at the position of the layer's hidden state (not
    at the position of its token)."""


class Oracle:
    """One model of the family, from a parsed config.json and the dequantised tensors.

    `latent_norm_eps` is the epsilon of q_a_layernorm and kv_a_layernorm; the default is
    `rms_norm_eps`. DeepSeek's and transformers' Python models always use 1e-6, which makes a
    difference if rms_norm_eps is not 1e-6 (Moonlight, GLM-5).

    Raises ValueError for a config that the formulas here do not cover.
    """

    def __init__(
        self,
        config: Config,
        tensors: dict[str, npt.NDArray[Any]],
        *,
        latent_norm_eps: float | None = None,
    ) -> None:
        refuse_unsupported(config)
        self.config = config
        self.tensors = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
        self.eps = float(config["rms_norm_eps"])
        self.latent_eps = self.eps if latent_norm_eps is None else latent_norm_eps
        self.frequencies, self.rope_gain = rope_frequencies(config)
        self.scale = softmax_scale(config)

    def forward(
        self,
        tokens: npt.NDArray[np.integer[Any]],
        *,
        absorbed: bool = False,
        mtp_hidden: Literal["post_norm", "pre_norm"] = "post_norm",
    ) -> OracleOutput:
        """Runs the whole model on tokens [B, T], causally and without a cache.

        `absorbed` folds W_UK into the query and W_UV into the output (one key head of width C + R)
        instead of expanding the latent into H heads. Both compute the same function.
        `mtp_hidden` selects the input of an MTP layer: the hidden state after or before the norm
        that precedes the head. That norm is model.norm for the first MTP layer and the previous
        layer's shared_head.norm for the next ones.
        """
        if mtp_hidden not in ("post_norm", "pre_norm"):
            raise ValueError(f"mtp_hidden: expected 'post_norm' or 'pre_norm', got {mtp_hidden!r}")
        layers = self.config["num_hidden_layers"]
        head = self.tensors["lm_head.weight"]
        x = self.tensors["model.embed_tokens.weight"][tokens]
        latents, routing = [], []
        for layer in range(layers):
            x, latent, chosen = self._decoder_layer(layer, x, absorbed)
            latents.append(latent)
            if chosen is not None:
                routing.append(chosen)
        hidden = self._norm("model.norm", x)

        previous = hidden if mtp_hidden == "post_norm" else x
        mtp_logits, mtp_latents = [], []
        for k in range(self.config.get("num_nextn_predict_layers") or 0):
            x, latent = self._mtp_layer(layers + k, previous, tokens[:, k + 1 :], absorbed)
            normed = self._norm(f"model.layers.{layers + k}.shared_head.norm", x)
            mtp_logits.append(normed @ head.T)
            mtp_latents.append(latent)
            previous = normed if mtp_hidden == "post_norm" else x

        return OracleOutput(
            logits=hidden @ head.T,
            mtp_logits=tuple(mtp_logits),
            routing=routing,
            hidden=hidden,
            latents=latents,
            mtp_latents=tuple(mtp_latents),
        )

    def _mtp_layer(
        self, layer: int, previous: Array, shifted: npt.NDArray[Any], absorbed: bool
    ) -> tuple[Array, Array]:
        """h'_i = W_eh [RMSNorm_e(Emb(t_{i+1+k})) ; RMSNorm_h(h_i)], then a decoder layer at i.

        `shifted` [B, T-1-k] contains t_{i+1+k}. `previous` is longer; its last positions have no
        next token. The checkpoint's eh_proj takes the embedding first; equation 21 of the V3 report
        has it second.
        """
        prefix = f"model.layers.{layer}"
        embedded = self.tensors["model.embed_tokens.weight"][shifted]
        hidden = previous[:, : shifted.shape[1]]
        joined = [self._norm(f"{prefix}.enorm", embedded), self._norm(f"{prefix}.hnorm", hidden)]
        x = self._linear(f"{prefix}.eh_proj", np.concatenate(joined, axis=-1))
        x, latent, _ = self._decoder_layer(layer, x, absorbed)
        return x, latent

    def _decoder_layer(
        self, layer: int, x: Array, absorbed: bool
    ) -> tuple[Array, Array, npt.NDArray[np.int64] | None]:
        """x += MLA(norm(x)); x += FFN(norm(x)). Returns x, the latent, and the routing or None."""
        prefix = f"model.layers.{layer}"
        attended, latent = self._attention(
            f"{prefix}.self_attn", self._norm(f"{prefix}.input_layernorm", x), absorbed
        )
        x = x + attended
        normed = self._norm(f"{prefix}.post_attention_layernorm", x)
        experts = self.config.get("n_routed_experts")
        if experts is None or layer < self.config["first_k_dense_replace"]:
            return x + self._mlp(f"{prefix}.mlp", normed), latent, None
        mixed, chosen = self._moe(f"{prefix}.mlp", normed)
        return x + mixed, latent, chosen

    def _attention(self, prefix: str, x: Array, absorbed: bool) -> tuple[Array, Array]:
        """Multi-head latent attention of x [B, T, D]. Returns the output [B, T, D] and the latent.

        c = RMSNorm(W_DKV x); k_r = RoPE(W_KR x), one for all heads; q = W_UQ RMSNorm(W_DQ x), or
        W_Q x without q_lora_rank. With p_hts = softmax over s <= t of
        scale (q_n,ht . W_UK,h c_s + RoPE(q_r,ht) . k_r,s): out_t = W_O [sum_s p_hts W_UV,h c_s]_h.
        """
        config = self.config
        heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
        nope, rope, value = (
            config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        batch, length, _ = x.shape

        if config.get("q_lora_rank") is None:
            q = self._linear(f"{prefix}.q_proj", x)
        else:
            q = self._linear(f"{prefix}.q_a_proj", x)
            q = self._norm(f"{prefix}.q_a_layernorm", q, self.latent_eps)
            q = self._linear(f"{prefix}.q_b_proj", q)
        q = q.reshape(batch, length, heads, nope + rope)
        cos, sin = self._angles(length)
        q_nope, q_rope = q[..., :nope], rotate(q[..., nope:], cos[:, None], sin[:, None])

        down = self._linear(f"{prefix}.kv_a_proj_with_mqa", x)
        c = self._norm(f"{prefix}.kv_a_layernorm", down[..., :rank], self.latent_eps)
        k_rope = rotate(down[..., rank:], cos, sin)  # the rope key is not normed

        up = self.tensors[f"{prefix}.kv_b_proj.weight"].reshape(heads, nope + value, rank)
        w_uk, w_uv = up[:, :nope], up[:, nope:]
        if absorbed:
            q_latent = np.einsum("bthn,hnc->bthc", q_nope, w_uk)
            scores = np.einsum("bthc,bsc->bhts", q_latent, c)
        else:
            k_nope = np.einsum("bsc,hnc->bshn", c, w_uk)
            scores = np.einsum("bthn,bshn->bhts", q_nope, k_nope)
        scores = self.scale * (scores + np.einsum("bthr,bsr->bhts", q_rope, k_rope))
        visible = np.tril(np.ones((length, length), bool))
        probabilities = softmax(np.where(visible, scores, -np.inf))
        if absorbed:
            o_latent = np.einsum("bhts,bsc->bthc", probabilities, c)
            out = np.einsum("bthc,hvc->bthv", o_latent, w_uv)
        else:
            v = np.einsum("bsc,hvc->bshv", c, w_uv)
            out = np.einsum("bhts,bshv->bthv", probabilities, v)
        out = self._linear(f"{prefix}.o_proj", out.reshape(batch, length, heads * value))
        return out, np.concatenate([c, k_rope], axis=-1)

    def _angles(self, length: int) -> tuple[Array, Array]:
        """Returns cos and sin [T, R/2] of position * frequency, times YaRN's multiplier."""
        angles = np.arange(length, dtype=np.float64)[:, None] * self.frequencies
        return self.rope_gain * np.cos(angles), self.rope_gain * np.sin(angles)

    def _moe(self, prefix: str, x: Array) -> tuple[Array, npt.NDArray[np.int64]]:
        """Returns the sum of w_e expert_e(x) over selected e, plus shared(x) unscaled, and the
        selected experts [B, T, K]."""
        flat = x.reshape(-1, x.shape[-1])
        logits = flat @ self.tensors[f"{prefix}.gate.weight"].T
        bias = self.tensors.get(f"{prefix}.gate.e_score_correction_bias")
        chosen, weights = route(self.config, logits, bias)
        out = np.zeros_like(flat)
        for expert in range(logits.shape[1]):
            rows, slots = np.nonzero(chosen == expert)
            if rows.size:
                y = self._mlp(f"{prefix}.experts.{expert}", flat[rows])
                out[rows] += weights[rows, slots, None] * y
        if self.config.get("n_shared_experts"):  # n shared experts are one MLP of n times the width
            out += self._mlp(f"{prefix}.shared_experts", flat)
        return out.reshape(x.shape), chosen.reshape(*x.shape[:-1], chosen.shape[-1])

    def _mlp(self, prefix: str, x: Array) -> Array:
        """down(silu(gate x) * up x)."""
        gate = self._linear(f"{prefix}.gate_proj", x)
        return self._linear(
            f"{prefix}.down_proj", gate * sigmoid(gate) * self._linear(f"{prefix}.up_proj", x)
        )

    def _linear(self, name: str, x: Array) -> Array:
        return x @ self.tensors[f"{name}.weight"].T

    def _norm(self, name: str, x: Array, eps: float | None = None) -> Array:
        """w * x / sqrt(mean(x^2) + eps)."""
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        scale = np.sqrt(mean_square + (self.eps if eps is None else eps))
        return self.tensors[f"{name}.weight"] * x / scale


def route(config: Config, logits: Array, bias: Array | None) -> tuple[npt.NDArray[np.int64], Array]:
    """Returns the selected experts [n, K] (sorted) and their weights [n, K] for logits [n, E].

    noaux_tc              s = sigmoid(logits), selected by s + bias. A group's score is the sum of
                          its two best. w = s_selected, / (sum + 1e-20) if norm_topk_prob, always
                          times the factor. The bias influences only the selection.
    greedy                s = softmax(logits), selected by s over all experts. group_limited_greedy
    s = softmax(logits), selected by s. A group's score is its best. With softmax, w = s_selected /
    (sum + 1e-20) if norm_topk_prob, else s_selected times the factor.

    Experts outside the topk_group best groups get -inf, so that an expert inside them with a
    negative biased score is still preferred. With zero it would not be.
    """
    method = config["topk_method"]
    scores = sigmoid(logits) if method == "noaux_tc" else softmax(logits)
    ranking = scores.copy()
    if method == "noaux_tc":
        if bias is None:
            raise ValueError("noaux_tc: expected a tensor e_score_correction_bias, got none")
        ranking += bias
    if method != "greedy":
        tokens, experts = ranking.shape
        width = experts // config["n_group"]
        grouped = np.sort(ranking.reshape(tokens, config["n_group"], width), axis=-1)
        best = grouped[..., -2:].sum(-1) if method == "noaux_tc" else grouped[..., -1]
        groups = top_k(best, config["topk_group"])
        for token in range(tokens):
            outside = ~np.isin(np.arange(experts) // width, groups[token])
            ranking[token, outside] = -np.inf
    chosen = top_k(ranking, config["num_experts_per_tok"])
    weights = np.take_along_axis(scores, chosen, axis=1)
    factor = config["routed_scaling_factor"]
    if config["norm_topk_prob"]:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
        return chosen, weights * factor if method == "noaux_tc" else weights
    return chosen, weights * factor


def top_k(values: Array, k: int) -> npt.NDArray[np.int64]:
    """Returns the indices [n, k] of the k largest values in each row of [n, m], in ascending
    order."""
    return np.sort(np.argsort(-values, axis=-1, kind="stable")[:, :k], axis=-1)


def rope_settings(config: Config) -> Config:
    """Returns rope_theta, rope_type and the YaRN numbers from either form of config.json.

    Published files have rope_theta and rope_scaling. transformers 5 writes rope_parameters.
    """
    settings = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    settings.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    settings.setdefault("rope_type", settings.get("type", "default"))
    return settings


def mscale(factor: float, weight: float) -> float:
    """0.1 weight ln(factor) + 1, and 1 for a factor of at most 1."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def rope_frequencies(config: Config) -> tuple[Array, float]:
    """Returns radians per position [R/2] and the multiplier of cos and sin.

    f_i = theta^(-2i/R). YaRN: dim(n) = R ln(original / (2 pi n)) / (2 ln theta);
    low = max(floor dim(beta_fast), 0), high = min(ceil dim(beta_slow), R - 1);
    r_i = clip((i - low) / (high - low), 0, 1); f_i <- r_i f_i / factor + (1 - r_i) f_i.
    It applies at every length, as in transformers. DeepSeek's demo applies it only if max_seq_len
    exceeds the original length.
    """
    settings, rope = rope_settings(config), config["qk_rope_head_dim"]
    theta = float(settings["rope_theta"])
    i = np.arange(rope // 2, dtype=np.float64)
    plain = theta ** (-2 * i / rope)
    if settings["rope_type"] == "default":
        return plain, 1.0

    def dim(rotations: float) -> float:
        original = settings["original_max_position_embeddings"]
        return rope * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low = max(math.floor(dim(settings.get("beta_fast", 32))), 0)
    high: float = min(math.ceil(dim(settings.get("beta_slow", 1))), rope - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((i - low) / (high - low), 0, 1)
    factor = settings["factor"]
    gain = mscale(factor, settings.get("mscale", 1)) / mscale(
        factor, settings.get("mscale_all_dim", 0)
    )
    return plain / factor * ramp + plain * (1 - ramp), gain


def softmax_scale(config: Config) -> float:
    """(N + R)^-1/2, times mscale(factor, mscale_all_dim)^2 under YaRN."""
    settings = rope_settings(config)
    scale = (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5
    if settings["rope_type"] == "default":
        return scale
    return scale * mscale(settings["factor"], settings.get("mscale_all_dim", 0)) ** 2


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates the interleaved pairs (x0, x1), (x2, x3), ... of x [..., R]. Returns half layout."""
    x1, x2 = x[..., 0::2], x[..., 1::2]
    return np.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)


def sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x), through logaddexp: no overflow, and full relative precision near zero."""
    return np.exp(-np.logaddexp(0.0, -x))


def softmax(x: Array) -> Array:
    """e^x / sum e^x over the last axis; -inf gives 0. An empty x is returned as it is."""
    if x.size == 0:
        return x
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def dequantize(
    weight: npt.NDArray[Any], scale: npt.NDArray[Any], block: tuple[int, int] = (128, 128)
) -> Array:
    """w_ij = weight_ij * scale_{i // b0, j // b1}: multiplied, although it is named scale_inv.

    weight [out, in]; scale [ceil(out / b0), ceil(in / b1)]; a side's last block may be partial.
    Raises ValueError if the scale has another shape.
    """
    rows, columns = weight.shape
    expected = (-(-rows // block[0]), -(-columns // block[1]))
    if scale.shape != expected:
        raise ValueError(f"scale: expected shape {expected} for {weight.shape}, got {scale.shape}")
    every = np.repeat(np.repeat(scale.astype(np.float64), block[0], axis=0), block[1], axis=1)
    return weight.astype(np.float64) * every[:rows, :columns]


def relative_error(got: npt.ArrayLike, want: npt.ArrayLike) -> float:
    """|got - want| / |want| in float64, Euclidean norms over all elements; NaN if anything is NaN.

    Raises ValueError unless the shapes agree, because broadcasting would hide a missing axis.
    """
    left, right = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if left.shape != right.shape:
        raise ValueError(f"expected shape {right.shape}, got {left.shape}")
    difference, size = np.linalg.norm(left - right), np.linalg.norm(right)
    return float(difference) if size == 0 else float(difference / size)


def refuse_unsupported(config: Config) -> None:
    """Raises ValueError with the key's name for a config that would be computed wrongly here."""
    allowed: dict[str, tuple[Any, ...]] = {
        "attention_bias": (False, None),
        "hidden_act": ("silu", None),
        "moe_layer_freq": (1, None),
        "rope_interleave": (True, None),
        "tie_word_embeddings": (False, None),
    }
    for key, values in allowed.items():
        if config.get(key) not in values:
            raise ValueError(f"{key}: expected {values[0]!r}, got {config[key]!r}")
    settings = rope_settings(config)
    if settings["rope_type"] not in ("default", "yarn"):
        raise ValueError(f"rope_type: expected default or yarn, got {settings['rope_type']!r}")
    for key in ("attention_factor", "truncate"):
        if settings.get(key) not in (None, True):
            raise ValueError(f"{key}: expected it absent, got {settings[key]!r}")
    if config.get("n_routed_experts") is None:
        return
    pair = (config["scoring_func"], config["topk_method"])
    known = (("sigmoid", "noaux_tc"), ("softmax", "greedy"), ("softmax", "group_limited_greedy"))
    if pair not in known:
        raise ValueError(f"scoring_func, topk_method: expected one of {known}, got {pair}")
    if pair[1] != "greedy":
        reachable = config["n_routed_experts"] // config["n_group"] * config["topk_group"]
        if config["num_experts_per_tok"] > reachable:
            raise ValueError(
                f"num_experts_per_tok: expected at most {reachable} (the experts of topk_group "
                f"groups), got {config['num_experts_per_tok']}"
            )
