"""The peer of scripts.bench_training: the same training step in plain PyTorch, on one GPU.

    python -m benchmarks.training_torch                 # Moonlight, 8 layers, 4 x 4,096 tokens
    python -m benchmarks.training_torch --batch 8

It is written as one would for one GPU: float32 parameters that are cast to bfloat16 in every step,
``torch.compile`` of each block, scaled_dot_product_attention, ``torch._grouped_mm`` over rows
sorted by expert, cross-entropy of whole float32 logits, clipping by the global norm and the fused
AdamW. Weights and tokens are random, and nothing is recomputed.

Prints one JSON object with the keys of bench_training. MFU counts as that does.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time

import torch
from torch import nn
from torch.nn import functional

from dsv3_jax import presets
from dsv3_jax.config import ModelConfig
from dsv3_jax.training.metrics_log import utilisation
from scripts.bench_training import model_config

BF16 = torch.bfloat16


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, device="cuda") * 0.02)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, weight.to(BF16))


class Norm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, device="cuda"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), 1e-6)


class Attention(nn.Module):
    """Latent attention in expanded form, without a query latent."""

    def __init__(self, c: ModelConfig, length: int):
        super().__init__()
        self.c, heads, hidden = c, c.num_attention_heads, c.hidden_size
        self.q = parameter(heads * c.qk_head_dim, hidden)
        self.kv_a = parameter(c.latent_dim, hidden)
        self.norm = Norm(c.kv_lora_rank)
        self.kv_b = parameter(heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
        self.o = parameter(hidden, heads * c.v_head_dim)
        R = c.qk_rope_head_dim
        frequencies = c.rope_theta ** (-torch.arange(0, R, 2, device="cuda") / R)
        angles = torch.arange(length, device="cuda")[:, None] * frequencies
        self.cos, self.sin = angles.cos()[:, None], angles.sin()[:, None]

    def rope(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.float()[..., 0::2], x.float()[..., 1::2]
        first, second = a * self.cos - b * self.sin, b * self.cos + a * self.sin
        return torch.cat([first, second], -1).to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        c, (B, T, _) = self.c, x.shape
        N = c.qk_nope_head_dim
        q = linear(x, self.q).view(B, T, -1, c.qk_head_dim)
        q = torch.cat([q[..., :N], self.rope(q[..., N:])], -1)
        latent = linear(x, self.kv_a)
        key_rope = self.rope(latent[..., None, c.kv_lora_rank :])
        kv = linear(self.norm(latent[..., : c.kv_lora_rank]), self.kv_b)
        kv = kv.view(B, T, -1, N + c.v_head_dim)
        k = torch.cat([kv[..., :N], key_rope.expand(-1, -1, kv.shape[2], -1)], -1)
        q, k, v = (each.transpose(1, 2) for each in (q, k, kv[..., N:]))
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=c.softmax_scale
        )
        return linear(out.transpose(1, 2).reshape(B, T, -1), self.o)


class MLP(nn.Module):
    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.gate, self.up = parameter(width, hidden), parameter(width, hidden)
        self.down = parameter(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(functional.silu(linear(x, self.gate)) * linear(x, self.up), self.down)


class Experts(nn.Module):
    """Sigmoid scores, the top k of them, and one shared expert. Rows are sorted by expert."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.c, E = c, c.n_routed_experts
        hidden, width = c.hidden_size, c.moe_intermediate_size
        self.router = parameter(E, hidden)
        self.bias = torch.zeros(E, device="cuda")
        self.gate, self.up = parameter(E, width, hidden), parameter(E, width, hidden)
        self.down = parameter(E, hidden, width)
        self.shared = MLP(hidden, c.n_shared_experts * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        c, K = self.c, self.c.num_experts_per_tok
        tokens = x.flatten(0, 1)
        scores = torch.sigmoid(tokens.float() @ self.router.t())
        experts = (scores + self.bias).topk(K, -1).indices
        weights = scores.gather(1, experts)
        weights = c.routed_scaling_factor * weights / weights.sum(-1, keepdim=True)
        order = experts.flatten().argsort(stable=True)
        ends = torch.bincount(experts.flatten(), minlength=c.n_routed_experts).cumsum(0)

        def grouped(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
            transposed = matrices.to(BF16).transpose(-1, -2)
            multiply = torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]
            return multiply(rows, transposed, offs=ends.to(torch.int32))

        rows = tokens[order // K]
        out = grouped(functional.silu(grouped(rows, self.gate)) * grouped(rows, self.up), self.down)
        out = out.float() * weights.flatten()[order, None]
        mixed = torch.zeros_like(tokens, dtype=torch.float32).index_add(0, order // K, out)
        return mixed.to(x.dtype).view_as(x) + self.shared(x)


class Block(nn.Module):
    def __init__(self, c: ModelConfig, length: int, dense: bool):
        super().__init__()
        self.norms = nn.ModuleList(Norm(c.hidden_size) for _ in range(2))
        self.attention = Attention(c, length)
        self.mlp = MLP(c.hidden_size, c.intermediate_size) if dense else Experts(c)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, c: ModelConfig, length: int):
        super().__init__()
        self.embedding, self.head = (parameter(c.vocab_size, c.hidden_size) for _ in range(2))
        dense = c.first_k_dense_replace
        layers = range(c.num_hidden_layers)
        self.blocks = nn.ModuleList(Block(c, length, i < dense) for i in layers)
        self.compiled = [torch.compile(block) for block in self.blocks]
        self.norm = Norm(c.hidden_size)
        self.loss = torch.compile(self.loss_of)

    def loss_of(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = linear(self.norm(x), self.head).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = functional.embedding(tokens[:, :-1], self.embedding).to(BF16)
        for block in self.compiled:
            x = block(x)
        return self.loss(x, tokens[:, 1:])


def measure(c: ModelConfig, batch: int, length: int, steps: int, warm_up: int) -> dict[str, object]:
    torch.manual_seed(0)
    model = Model(c, length)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    tokens = torch.randint(1, c.vocab_size, (batch, length + 1), device="cuda")
    losses, seconds = [], []
    for count in (1, warm_up, steps):
        began = time.perf_counter()
        for _ in range(count):
            loss = model(tokens)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    step, device = seconds[-1] / steps, torch.cuda.get_device_name()
    rate = batch * length / step
    return {
        "parameters": sum(each.numel() for each in model.parameters()),
        "batch": batch,
        "length": length,
        "ms": 1000 * step,
        "tokens_per_second": rate,
        "mfu": utilisation(c, length, rate, device, "bfloat16", None),
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "first_step_s": seconds[0],
        "losses": [float(loss) for loss in losses],
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time training steps of PyTorch on one GPU.")
    parser.add_argument("--config", default="moonlight-16b", choices=presets.PRESETS)
    parser.add_argument("--layers", type=int, default=8, help="0: all")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=3)
    given = parser.parse_args(arguments)
    config = model_config(given.config, given.layers, given.length)
    machine = {
        "peer": "torch",
        "date": datetime.date.today().isoformat(),
        "machine": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()},
    }
    sizes = given.batch, given.length, given.steps, given.warm_up
    print(json.dumps(machine | measure(config, *sizes)))


if __name__ == "__main__":
    main()
