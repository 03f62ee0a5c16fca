"""The work of one step: the amounts from which its time follows."""

from __future__ import annotations

import dataclasses

from dsv3_jax.engine.scheduling.step_plan import ScheduledRequest, ShardPlan, StepPlan
from dsv3_jax.simulator.workload import SimulatedRequest


@dataclasses.dataclass(frozen=True)
class StepWork:
    """Amounts of one decode step, or of one step that prefills. Unless noted they are those of the
    data-parallel shard that has most, because all shards wait for it."""

    decodes: int
    """Requests that decode."""
    decode_queries: int
    """Tokens that decoding requests compute, their drafts included."""
    decode_keys: int
    """Cached tokens of the decoding requests."""
    decode_pairs: int
    """Pairs of a decoding query and a key that it attends to."""
    chunks: int
    """Prefill chunks."""
    prompt_tokens: int
    """Tokens of these chunks."""
    prompt_keys: int
    """Cached tokens that the chunks read, their own included."""
    prompt_pairs: int
    """Pairs of a prompt token and a key that it attends to."""
    all_tokens: int
    """Tokens of all shards, of decoding requests and of chunks."""
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
