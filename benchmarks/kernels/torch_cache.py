"""The float8 format of a cached token, in torch: see ``pallas_kernels.mla_decode.float8_cache``."""

from __future__ import annotations

import torch

from benchmarks.kernels.sparse_shapes import LATENT, ROPE

Tensor = torch.Tensor
BLOCK = 128  # latent columns that share a scale


def float8_tokens(pages: Tensor) -> Tensor:
    """Quantizes to [..., 656] bytes: float8 latent, float32 group scales, bfloat16 rope."""
    latent = pages[..., :LATENT].float().unflatten(-1, (-1, BLOCK))
    scale = latent.abs().amax(-1, keepdim=True) / 448
    values = (latent / scale).to(torch.float8_e4m3fn).flatten(-2)
    parts = values, scale.squeeze(-1), pages[..., LATENT:].contiguous()
    return torch.cat([part.view(torch.uint8) for part in parts], -1)


def latent_of(tokens: Tensor) -> Tensor:
    """Dequantizes the result of :func:`float8_tokens` to float32 [..., 576]."""
    values, scale, rope = tokens.split([LATENT, 16, 2 * ROPE], -1)
    scale = scale.contiguous().view(torch.float32).repeat_interleave(BLOCK, -1)
    latent = values.contiguous().view(torch.float8_e4m3fn).float() * scale
    return torch.cat([latent, rope.contiguous().view(torch.bfloat16).float()], -1)
