"""What one step computes: the amounts from which its time follows."""

from __future__ import annotations

import dataclasses

from dsv3_jax.engine.step_plan import ShardPlan, StepPlan


@dataclasses.dataclass(frozen=True)
class StepWork:
    """Amounts of one decode step, or of one step that prefills. Unless noted they are those of the
    data-parallel shard that has most, because all shards wait for it."""

    decodes: int
    """Requests that decode."""
    decode_queries: int
    """Tokens that decoding requests compute, their drafts included."""
    decode_keys: int
    """Distinct cached tokens of the decoding requests. A shared prefix counts once: its pages of a
    layer fit into the device's second-level cache."""
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

    @property
    def tokens(self) -> int:
        """Tokens of the fullest shard."""
        return self.decode_queries + self.prompt_tokens

    @classmethod
    def of(cls, plan: StepPlan) -> StepWork:
        """Returns the work of each step of a plan."""
        shards = [_amounts(shard) for shard in plan.shards if shard.decodes or shard.chunks]
        all_tokens = sum(shard[1] + shard[5] for shard in shards)
        return cls(*(max(amounts) for amounts in zip(*shards, strict=True)), all_tokens)


def _amounts(plan: ShardPlan) -> tuple[int, ...]:
    queries = keys = pairs = 0
    families: set[int] = set()
    for request, drafts in zip(plan.decodes, plan.drafts, strict=True):
        length = len(request.tokens)
        queries += 1 + drafts
        keys += length
        if (family := getattr(request, "family", -1)) >= 0:
            if family in families:
                keys -= request.prefix  # type: ignore
            families.add(family)
        pairs += (1 + drafts) * length
    prompt_tokens = prompt_keys = prompt_pairs = 0
    for chunk in plan.chunks:
        prompt_tokens += chunk.count
        prompt_keys += chunk.start + chunk.count
        prompt_pairs += chunk.count * (2 * chunk.start + chunk.count + 1) // 2
    return (
        *(len(plan.decodes), queries, keys, pairs),
        *(len(plan.chunks), prompt_tokens, prompt_keys, prompt_pairs),
    )
