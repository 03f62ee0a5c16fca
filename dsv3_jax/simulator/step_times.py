"""The work of one step, and its time by the planner's model: the roofline and its shares.

:class:`StepModel` reads from :mod:`dsv3_jax.plan` how many bytes, FLOP and sent bytes one step
needs on one device. Everything is linear in the tokens except the number of distinct
experts, so that a step costs a few multiplications and no JAX.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol

import jax.numpy as jnp
from jax.typing import DTypeLike

from dsv3_jax.accounting import distinct_experts, flops_per_token
from dsv3_jax.engine.scheduling.step_plan import ScheduledRequest, ShardPlan, StepPlan
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.network import traffic
from dsv3_jax.plan.roofline import cached_token_bytes
from dsv3_jax.plan.weights import ModelShard, read_bytes
from dsv3_jax.simulator.workload import SimulatedRequest


@dataclasses.dataclass(frozen=True)
class StepWork:
    """Amounts of one decode step, or of one step that prefills. Unless noted they are those of the
    data-parallel shard that has most, because all shards wait for it."""

    decodes: int  # requests that decode
    decode_queries: int  # tokens that decoding requests compute, their drafts included
    decode_keys: int  # cached tokens of the decoding requests
    decode_pairs: int  # pairs of a decoding query and a key that it attends to
    chunks: int  # prefill chunks
    prompt_tokens: int  # tokens of these chunks
    prompt_keys: int  # cached tokens that the chunks read, their own included
    prompt_pairs: int  # pairs of a prompt token and a key that it attends to
    all_tokens: int  # tokens of all shards, of decoding requests and of chunks
    repeated_keys: int = 0
    """Tokens of shared prefixes in ``decode_keys`` and ``prompt_keys``, beyond the first request of
    the step that reads them."""

    @property
    def tokens(self) -> int:
        """Tokens of the fullest shard."""
        return self.decode_queries + self.prompt_tokens

    @classmethod
    def of(cls, plan: StepPlan) -> StepWork:
        """Returns the work of each step of a plan."""
        shards = [_amounts(shard) for shard in plan.shards if shard.decodes or shard.chunks]
        most = {name: max(amounts[name] for amounts in shards) for name in shards[0]}
        all_tokens = sum(each["decode_queries"] + each["prompt_tokens"] for each in shards)
        return cls(**most, all_tokens=all_tokens)


def _amounts(plan: ShardPlan) -> dict[str, int]:
    """Returns the amounts of one shard by the names of the fields above."""
    queries = keys = pairs = repeated = 0
    families: set[int] = set()
    for request, drafts in zip(plan.decodes, plan.drafts, strict=True):
        length = len(request.tokens)
        queries += 1 + drafts
        keys += length
        repeated += _repeated(request, length, families)
        pairs += (1 + drafts) * length
    prompt_tokens = prompt_keys = prompt_pairs = 0
    for chunk in plan.chunks:
        prompt_tokens += chunk.count
        prompt_keys += chunk.start + chunk.count
        repeated += _repeated(chunk.request, chunk.start, families)
        prompt_pairs += chunk.count * (2 * chunk.start + chunk.count + 1) // 2
    return {
        "decodes": len(plan.decodes),
        "decode_queries": queries,
        "decode_keys": keys,
        "decode_pairs": pairs,
        "chunks": len(plan.chunks),
        "prompt_tokens": prompt_tokens,
        "prompt_keys": prompt_keys,
        "prompt_pairs": prompt_pairs,
        "repeated_keys": repeated,
    }


def _repeated(request: ScheduledRequest, cached: int, families: set[int]) -> int:
    """Returns the tokens of a shared prefix among the cached tokens of a request, if another one in
    ``families`` has the same prefix. Adds its own."""
    if not isinstance(request, SimulatedRequest) or cached < request.prefix or not request.prefix:
        return 0
    if request.family in families:
        return request.prefix
    families.add(request.family)
    return 0


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """Shares of a device's peak rates that its programs reach, and what they take besides.

    The default is the roofline itself: a lower bound on time.
    """

    memory: float = 1.0
    arithmetic: float = 1.0
    network: float = 1.0
    pass_seconds: float = 0.0  # launches and latencies of a pass over the layers
    hides_network: bool = True
    """Whether sending overlaps with the rest, as with two micro-batches. Otherwise it adds to
    it."""

    def __post_init__(self) -> None:
        for name in ("memory", "arithmetic", "network"):
            if not 0 < (value := getattr(self, name)) <= 1:
                raise ValueError(f"{name}: expected a share above 0 and at most 1, got {value}")
        if not self.pass_seconds >= 0:
            raise ValueError(f"pass_seconds: expected 0 or more, got {self.pass_seconds}")


_MANY = 1000  # tokens from which the traffic of one is computed


class StepTime(NamedTuple):
    """The time of a step, and what it consists of."""

    seconds: float
    binding: str
    """The resource that takes longest: ``weights``, ``cache``, ``arithmetic``, ``network`` or
    ``overhead``."""
    program: str = ""  # name of the compiled program, if they are known


class StepTimes(Protocol):
    """Returns how long a device takes for a step."""

    def of(self, work: StepWork, steps: int) -> StepTime:
        """Returns the time of a dispatch with ``steps`` equal steps."""
        ...


class StepModel:
    """Step times of a deployment, whose batch and context do not matter, by the planner's model.
    ``shard`` is one device's, ``chunk_form`` the form of the chunks' attention."""

    def __init__(
        self,
        shard: ModelShard,
        deployment: Deployment,
        efficiency: Efficiency | None = None,
        *,
        chunk_form: str = "expanded",
        result_dtype: DTypeLike = jnp.float32,
    ):
        self.efficiency = efficiency or Efficiency()
        config, chip = shard.shapes.config, deployment.target.chip
        self._experts = shard.shapes.expert_slots, config.num_experts_per_tok
        used = [p for p in shard.parameters if "kv_b_proj" not in p.path]

        slots, per_token = self._experts

        def weights(tokens: int, local_tokens: int) -> float:
            sizes = {"experts_per_token": per_token, "expert_slots": slots}
            return read_bytes(used, tokens=tokens, local_tokens=local_tokens, **sizes)

        self._fixed_bytes = weights(0, 0) + shard.up_projection_bytes
        self._expert_bytes = sum(p.nbytes for p in used if "experts" in p.path)
        self._embedding_bytes = weights(0, 1) - weights(0, 0)
        float8 = deployment.activations is not None
        rates = chip.bf16_flops, chip.fp8_flops or chip.bf16_flops

        def flop_seconds(tokens: int, local_tokens: int) -> float:
            flop = shard.matmul_flop(tokens, local_tokens, decoding=True, float8=float8)
            return flop[0] / rates[0] + flop[1] / rates[1]

        self._expert_flop_seconds, self._flop_seconds = flop_seconds(1, 0), flop_seconds(0, 1)
        heads, sharers = map(shard.layout.num_shards, ("heads", "cached_tokens"))
        # A decode query over one key; over a prompt of two tokens the mean is one key.
        absorbed = flops_per_token(config, 1, "decode").attention
        expanded = flops_per_token(config, 2, "prefill").attention
        self._pair_seconds = absorbed / heads / sharers / rates[0]
        form = absorbed if chunk_form == "absorbed" else expanded
        self._prompt_pair_seconds = form / heads / sharers / rates[0]
        self._key_expansion_seconds = 0.0
        if chunk_form != "absorbed":
            # Each chunk expands the keys and values of all tokens cached before it.
            kv_b = [p for p in shard.parameters if p.is_matrix and "kv_b_proj" in p.path]
            elements = sum(p.elements for p in kv_b)
            rate = rates[1 if float8 and deployment.quantization == "fp8" else 0]
            self._key_expansion_seconds = 2 * elements / sharers / rate
        self._key_bytes = cached_token_bytes(deployment) / sharers
        sent = traffic(shard, deployment, _MANY, result_dtype)
        between = sent.between_nodes / chip.internode_bandwidth if sent.between_nodes else 0.0
        self._network_seconds = max(sent.within_node / chip.link_bandwidth, between) / _MANY
        self._bandwidth = chip.memory_bandwidth
        self._l2_bandwidth = chip.l2_bandwidth

    def parts(self, work: StepWork) -> dict[str, float]:
        """Returns the seconds that each resource takes for a step."""
        share = self.efficiency
        slots, per_token = self._experts
        visited = distinct_experts(slots, per_token, work.all_tokens) / slots
        memory = share.memory * self._bandwidth
        weights = self._fixed_bytes + visited * self._expert_bytes
        flop_seconds = (
            self._expert_flop_seconds * work.all_tokens
            + self._flop_seconds * work.tokens
            + self._pair_seconds * work.decode_pairs
            + self._prompt_pair_seconds * work.prompt_pairs
            + self._key_expansion_seconds * (work.prompt_keys - work.prompt_tokens)
        )
        return {
            "weights": (weights + self._embedding_bytes * work.tokens) / memory,
            "cache": self._cache_seconds(work, share.memory),
            "arithmetic": flop_seconds / share.arithmetic,
            "network": self._network_seconds * work.tokens / share.network,
            "overhead": share.pass_seconds,
        }

    def _cache_seconds(self, work: StepWork, share: float) -> float:
        """Returns the time of reading cached tokens. All of them come through the second-level
        cache. Those that a layer reads repeatedly come from memory once, if it has such a cache,
        into which a layer's share of them is assumed to fit."""
        keys = work.decode_keys + work.prompt_keys
        if self._l2_bandwidth is None:
            return keys * self._key_bytes / (share * self._bandwidth)
        distinct = (keys - work.repeated_keys) / self._bandwidth
        return max(distinct, keys / self._l2_bandwidth) * self._key_bytes / share

    def of(self, work: StepWork, steps: int) -> StepTime:
        """Returns the time of a dispatch with ``steps`` equal steps."""
        parts = self.parts(work)
        computing = max(parts["weights"] + parts["cache"], parts["arithmetic"])
        if self.efficiency.hides_network:
            seconds = max(computing, parts["network"])
        else:
            seconds = computing + parts["network"]
        binding = max(parts, key=parts.__getitem__)
        return StepTime(steps * (seconds + parts["overhead"]), binding)
