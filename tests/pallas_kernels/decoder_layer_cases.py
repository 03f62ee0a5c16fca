"""Random inputs of feed_forward, and its results in float64."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.block_quant.reference import block_dequant, block_quant, integer_quant
from pallas_kernels.decoder_layer.reference import (
    Matrices,
    Projection,
    Router,
    is_integer,
    scale_block,
    scales_shape,
)
from pallas_kernels.hopper.split_kv import Parts
from pallas_kernels.route.reference import Rule
from tests.pallas_kernels.numerics import rounded

FLOAT32, BFLOAT16, FLOAT8 = "float32", "bfloat16", "float8_e4m3fn"
INT8, INT4 = "int8", "int4"
EPS = 1e-6


def stored_dtype(weights: str) -> str:
    """Returns the dtype in which a format is stored."""
    return "uint8" if weights == INT4 else weights


def in_format(matrix: jax.Array, weights: str) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Returns a float32 matrix, or a stack of them, in a format, and its scales if it has any."""
    if weights == FLOAT8:
        values, scale = block_quant(matrix, (128, 128))
    elif weights in (INT8, INT4):
        values, scale = integer_quant(matrix, *((8, None) if weights == INT8 else (4, 128)))
    else:
        return matrix.astype(weights), ()
    return values, (scale,)


def nearest_power_of_two(numbers: jax.Array) -> jax.Array:
    return jnp.ldexp(jnp.ones_like(numbers), jnp.rint(jnp.log2(numbers)).astype(jnp.int32))


def shape_in_format(shape: tuple[int, ...], weights: str) -> tuple[Any, tuple[Any, ...]]:
    """Returns the shapes of :func:`in_format`."""
    *rows, columns = shape
    stored = (*rows, columns // 2 if weights == INT4 else columns)
    matrix = jax.ShapeDtypeStruct(stored, stored_dtype(weights))
    if weights not in (FLOAT8, INT8, INT4):
        return matrix, ()
    return matrix, (jax.ShapeDtypeStruct(scales_shape(matrix), jnp.float32),)


def exact_matrix(matrix: Any, scales: Any) -> np.ndarray:
    """Returns a matrix in float64."""
    if not scales:
        return rounded(matrix, matrix.dtype)
    if is_integer(matrix.dtype):
        ones = jnp.ones_like(scales[0])
        values = np.asarray(block_dequant(matrix, ones, scale_block(matrix)), np.float64)
    else:
        values = rounded(matrix, matrix.dtype)
    blocks = scale_block(matrix)
    rows, columns = (np.arange(n) // b for n, b in zip(values.shape, blocks, strict=True))
    return values * np.asarray(scales[0], np.float64)[rows[:, None], columns]


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer's sizes and settings. Widths are those that the kernel takes."""

    tokens: int = 1
    width: int = 128
    ffn: int = 128
    """Hidden width of the dense or shared MLP, or 0."""
    expert_ffn: int = 0
    experts: int = 0
    rule: Rule | None = None
    dtype: str = FLOAT32
    weights: str = FLOAT32
    attention: int = 0
    """Width of attention's output before its projection, or 0 without the projection."""
    heads: int = 0
    """Heads whose outputs are latents, or 0 without W_UV."""
    latent: int = 0
    split: tuple[int, ...] = ()
    """Parts of each sequence's attention, 1 if it is not split; () if all have been merged."""

    def arguments(self, seed: int = 0) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        D, E = self.width, self.experts

        def normal(*shape: int, scale: float = 1.0) -> Any:
            return jnp.asarray(rng.standard_normal(shape) * scale, jnp.float32)

        def matrices(F: int, *stack: int) -> Matrices:
            made = [
                normal(*stack, F, D, scale=D**-0.5),
                normal(*stack, F, D, scale=D**-0.5),
                normal(*stack, D, F, scale=F**-0.5),
            ]
            (gate, up, down), scales = zip(*(in_format(m, self.weights) for m in made), strict=True)
            return Matrices(gate, up, down, sum(scales, ()))

        def projection() -> Projection:
            weight = normal(D, self.attention, scale=self.attention**-0.5)
            values, scales = in_format(weight, self.weights)
            # With powers of two the dequantized weights are exact in bfloat16: the reference, which
            # rounds them, then chooses experts by the same numbers as the kernel.
            return Projection(values, tuple(map(nearest_power_of_two, scales)))

        router = None
        if E:
            router = Router(normal(E, D, scale=0.1).astype(self.dtype), normal(E, scale=0.1))
        return {
            "h": normal(self.tokens, D).astype(self.dtype),
            "norm": (1 + normal(D, scale=0.1)).astype(self.dtype),
            "router": router,
            "shared": matrices(self.ffn) if self.ffn else None,
            "routed": matrices(self.expert_ffn, E) if E else None,
            "attended": self._attention_output(rng),
            "o_proj": projection() if self.attention else None,
        } | self._w_uv(lambda *shape: normal(*shape, scale=self.latent**-0.5).astype(self.dtype))

    def shapes(self) -> dict[str, Any]:
        """Returns the shapes of :meth:`arguments`, also for layers too large to make."""
        D, E = self.width, self.experts
        struct = jax.ShapeDtypeStruct

        def matrices(F: int, *stack: int) -> Matrices:
            shapes = (*stack, F, D), (*stack, F, D), (*stack, D, F)
            made, scales = zip(*(shape_in_format(s, self.weights) for s in shapes), strict=True)
            return Matrices(*made, sum(scales, ()))

        router = Router(struct((E, D), self.dtype), struct((E,), jnp.float32)) if E else None  # pyright: ignore
        return {
            "h": struct((self.tokens, D), self.dtype),
            "norm": struct((D,), self.dtype),
            "router": router,
            "shared": matrices(self.ffn) if self.ffn else None,
            "routed": matrices(self.expert_ffn, E) if E else None,
            "attended": self._attended_shape(),
            "o_proj": self._projection_shape() if self.attention else None,
        } | self._w_uv(lambda *shape: struct(shape, self.dtype))

    def _projection_shape(self) -> Projection:
        return Projection(*shape_in_format((self.width, self.attention), self.weights))

    def _w_uv(self, make: Any) -> dict[str, Any]:
        """Returns the argument, if there is one. ``make`` is a function of its shape."""
        if not self.heads:
            return {}
        return {"w_uv": make(self.heads, self.attention // self.heads, self.latent)}

    def _attention_output(self, rng: np.random.Generator) -> Any:
        """Returns attention's output, if it is an argument. Undefined parts of it are NaN."""
        if not self.split:
            if not self._attended:
                return None
            return jnp.asarray(rng.standard_normal(self._attended), jnp.float32).astype(self.dtype)
        shapes = self._attended_shape()
        out, partials, lse = (np.full(shape.shape, np.nan, np.float32) for shape in shapes[:3])
        entries = np.zeros(shapes.split_sequences.shape, np.int32)
        rows = self.tokens // len(self.split) * self.heads
        entry, first = 0, 1  # the first part is of no sequence
        for b, count in enumerate(self.split):
            if count == 1:
                out[b, :rows] = rng.standard_normal((rows, self.latent))
                continue
            own = slice(first, first + count), slice(0, rows)
            partials[own] = rng.standard_normal((count, rows, self.latent))
            lse[own] = 3 * rng.standard_normal((count, rows))
            # The first query sees nothing of the last part.
            partials[first + count - 1, 0], lse[first + count - 1, 0] = 0.0, -np.inf
            entries[entry, :3] = b, first, count
            entry, first = entry + 1, first + count
        entries[:, 3] = entry
        return Parts(
            jnp.asarray(out, self.dtype), jnp.asarray(partials), jnp.asarray(lse),
            jnp.asarray(entries),
        )  # fmt: skip

    def _attended_shape(self) -> Any:
        struct: Any = jax.ShapeDtypeStruct
        if not self.split:
            return struct(self._attended, self.dtype) if self._attended else None
        B, parts = len(self.split), 3 + sum(self.split)
        rows = self.tokens // B * self.heads + 2
        return Parts(
            struct((B, rows, self.latent), self.dtype),
            struct((parts, rows, self.latent), jnp.float32),
            struct((parts, rows), jnp.float32),
            struct((B + 1, 4), jnp.int32),
        )

    @property
    def _attended(self) -> tuple[int, ...]:
        width = self.heads * self.latent or self.attention
        return (self.tokens, width) if width else ()

    @property
    def options(self) -> dict[str, Any]:
        return {"rule": self.rule, "eps": EPS}


def rule(K: int, groups: int = 1, topk_groups: int = 1, method: str = "noaux_tc") -> Rule:
    """Returns a rule of DeepSeek-V3, or of V2 with another method."""
    scoring = "sigmoid" if method == "noaux_tc" else "softmax"
    return Rule(K, groups, topk_groups, method, scoring, method == "noaux_tc", 2.5)


def expected(arguments: dict[str, Any], experts: Any, weights: Any) -> np.ndarray:
    """Returns the output in float64, for the experts that an implementation chose."""

    def f64(x: Any) -> np.ndarray:
        return rounded(x, x.dtype)

    def dense(matrices: Matrices | Projection, n: int, index: Any) -> np.ndarray:
        matrix: Any = matrices[n]
        own = matrix, *matrices.scales[n : n + 1]
        matrix, *scales = own if index is None else (each[index] for each in own)
        return exact_matrix(matrix, scales)

    def mlp(x: np.ndarray, matrices: Matrices, index: Any = None) -> np.ndarray:
        gate, up = (dense(matrices, n, index) @ x for n in (0, 1))
        return dense(matrices, 2, index) @ (gate / (1 + np.exp(-gate)) * up)

    h = f64(arguments["h"])
    if arguments["attended"] is not None:
        dtype, attended = arguments["h"].dtype, arguments["attended"]
        if isinstance(attended, Parts):
            attended = _merged(attended, len(h) * len(arguments["w_uv"]), dtype)
        attended = f64(attended)
        if (w_uv := arguments.get("w_uv")) is not None:
            latents = attended.reshape(len(h), len(w_uv), -1)
            values = np.einsum("hvc,mhc->mhv", f64(w_uv), latents).reshape(len(h), -1)
            attended = f64(jnp.asarray(values, dtype))
        if arguments["o_proj"] is not None:
            attended = f64(jnp.asarray(attended @ dense(arguments["o_proj"], 0, None).T, dtype))
        h = f64(jnp.asarray(h + attended, dtype))
    x = h / np.sqrt(np.mean(h * h, axis=-1, keepdims=True) + EPS) * f64(arguments["norm"])
    out = h.copy()
    for t, row in enumerate(x):
        if arguments["shared"] is not None:
            out[t] += mlp(row, arguments["shared"])
        if experts is not None:
            for expert, weight in zip(np.asarray(experts)[t], f64(weights)[t], strict=True):
                out[t] += weight * mlp(row, arguments["routed"], int(expert))
    return out


def _merged(parts: Parts, rows: int, dtype: Any) -> jax.Array:
    """Returns the sequences' rows, merged in float64 and rounded."""
    merged = np.array(parts.out, np.float64)[:, : rows // len(parts.out)]
    for b, first, count, _ in np.asarray(parts.split_sequences):
        if count:
            own = slice(first, first + count), slice(0, merged.shape[1])
            weights = np.exp(np.asarray(parts.lse[own], np.float64))
            values = np.asarray(parts.partials[own], np.float64)
            total = np.einsum("pm,pmc->mc", weights, values)
            merged[b] = total / weights.sum(axis=0)[:, None]
    return jnp.asarray(merged, dtype)
