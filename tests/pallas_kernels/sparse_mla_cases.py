"""Test cases that every back-end of sparse_mla_decode and sparse_mla_prefill must pass."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import numpy as np
import numpy.typing as npt

from pallas_kernels import sparse_mla_decode, sparse_mla_prefill
from pallas_kernels.dispatch import Implementation
from tests.pallas_kernels import mla_decode_cases
from tests.pallas_kernels.numerics import TOLERANCES, Array, check, device, tolerance


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Queries and pages as of mla_decode, and the tokens of each query: [B, T, K], -1 for none."""

    dense: mla_decode_cases.Inputs
    indices: npt.NDArray[np.int32]

    @classmethod
    def random(cls, lengths: tuple[int, ...], K: int, *, T: int = 1, **kwargs) -> "Inputs":
        """Every query has up to K of the tokens that it sees; -1 stands anywhere."""
        dense = mla_decode_cases.Inputs.random(lengths, T=T, **kwargs)
        rng = np.random.default_rng(1)
        indices = np.full((len(lengths), T, K), -1, np.int32)
        for b, t in np.ndindex(len(lengths), T):
            visible = max(0, lengths[b] - T + 1 + t)
            chosen = rng.permutation(visible)[: rng.integers(0, K + 1) if K > 4 else K]
            columns = rng.permutation(K)[: len(chosen)]
            indices[b, t, columns] = chosen
        return cls(dense, indices)

    def expected(self) -> tuple[Array, Array]:
        """Returns out [B, T, H, C] and lse [B, T, H], computed query by query in float64."""
        x = self.dense
        B, T, H, C = x.q_latent.shape
        out, lse = np.zeros((B, T, H, C)), np.full((B, T, H), -np.inf)
        for b, t in np.ndindex(B, T):
            chosen = self.indices[b, t][self.indices[b, t] >= 0]
            if not len(chosen):
                continue
            seen = x.tokens(b, int(chosen.max()) + 1)[chosen]
            latents, keys = seen[:, :C], seen[:, C : C + x.q_rope.shape[-1]]
            scores = x.scale * (x.q_latent[b, t] @ latents.T + x.q_rope[b, t] @ keys.T)
            lse[b, t] = np.logaddexp.reduce(scores, axis=-1)
            out[b, t] = np.exp(scores - lse[b, t, :, None]) @ latents
        return out, lse


Operation = Implementation | Callable[..., Any]
"""An ``implementation`` argument of an operation, or a back-end's function."""


@functools.cache
def _compiled(op, implementation: Operation, scale: float):
    if callable(implementation):
        return jax.jit(functools.partial(implementation, scale=scale))
    return jax.jit(functools.partial(op, scale=scale, implementation=implementation))


class SparseMlaDecodeCases:
    """Each back-end subclasses this, and sets ``implementation`` and the shapes it requires."""

    implementation: ClassVar[Operation]
    dtype: ClassVar[str] = "float32"
    widths: ClassVar[tuple[int, int]] = (24, 8)
    heads: ClassVar[int] = 2

    def random(self, lengths: tuple[int, ...], K: int, **kwargs) -> Inputs:
        shapes = {"dtype": self.dtype, "widths": self.widths, "H": self.heads}
        return Inputs.random(lengths, K, **(shapes | kwargs))

    def run(self, x: Inputs, implementation: Operation | None = None) -> tuple[npt.NDArray, ...]:
        q_latent, q_rope, pages, tables, _ = x.dense.arrays()
        chosen = implementation or self.implementation
        op = _compiled(sparse_mla_decode, chosen, x.dense.scale)
        return tuple(map(np.asarray, op(q_latent, q_rope, pages, tables, x.indices)))

    def check(self, x: Inputs, implementation: Operation | None = None) -> None:
        """The pool's unwritten slots are NaN, so that a token read by mistake shows."""
        (out, lse), (want_out, want_lse) = self.run(x, implementation), x.expected()
        assert out.dtype == x.dense.dtype
        assert lse.dtype == np.float32
        check(out, want_out, max(TOLERANCES["float32"], tolerance(x.dense.dtype)))
        check(np.ravel(lse), np.ravel(want_lse), TOLERANCES["float32"])

    def test_ragged_selections(self):
        """Queries with all K tokens, fewer and none."""
        x = self.random((40, 5, 0, 33), K=12, T=5)
        assert {0, 12} <= set((x.indices >= 0).sum(-1).ravel()) | {12}
        self.check(x)

    def test_many_queries(self):
        self.check(self.random((60, 24), K=9, T=23))

    def test_no_token_at_all(self):
        x = self.random((20, 3), K=6)
        blind = dataclasses.replace(x, indices=np.full_like(x.indices, -1))
        out, lse = self.run(blind)
        assert (out == 0).all()
        assert (lse == -np.inf).all()

    def test_bfloat16(self):
        self.check(self.random((40, 17), K=12, T=2, dtype="bfloat16"))

    def test_pages_wider_than_tokens(self):
        x = self.random((40, 17), K=12, T=2)
        self.check(dataclasses.replace(x, dense=x.dense.wider()))


class SparseMlaPrefillCases:
    """Each back-end subclasses this, and sets ``implementation`` and the shapes it requires."""

    implementation: ClassVar[Operation]
    dtype: ClassVar[str] = "float32"
    widths: ClassVar[tuple[int, int]] = (24, 8)
    heads: ClassVar[int] = 2
    tokens: ClassVar[int] = 24

    def inputs(self) -> tuple[Inputs, Array]:
        """Returns two sequences, and their latents [B, S, CR]: NaN where no query chose them."""
        S = self.tokens
        x = Inputs.random(
            (S, S), K=7, T=S, H=self.heads, page=S, max_pages=1, widths=self.widths,
            dtype=self.dtype,
        )  # fmt: skip
        latents = x.dense.pages[x.dense.block_tables[:, 0]]
        chosen = [set(of_sequence.ravel()) for of_sequence in x.indices]
        for b, s in np.ndindex(*latents.shape[:2]):
            latents[b, s] = latents[b, s] if s in chosen[b] else np.nan
        return x, latents

    def test_equals_decode_over_one_page_each(self):
        """Compared with float64. Tokens that no query chose are NaN."""
        x, latents = self.inputs()
        op = _compiled(sparse_mla_prefill, self.implementation, x.dense.scale)
        arrays = [device(a, self.dtype) for a in (x.dense.q_latent, x.dense.q_rope, latents)]
        (out, lse), (want_out, want_lse) = op(*arrays, x.indices), x.expected()
        check(np.asarray(out), want_out, max(TOLERANCES["float32"], tolerance(self.dtype)))
        check(np.ravel(lse), np.ravel(want_lse), TOLERANCES["float32"])
