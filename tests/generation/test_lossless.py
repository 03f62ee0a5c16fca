"""Sampled tokens keep the model's distribution: 53,248 generations per setting.

Every kind of speculation is compared with the exact joint probabilities of the first two tokens. A
vocabulary of 8 gives 64 pairs. The whole Generator runs, including MTP cache and filters.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dsv3_jax
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.offline.generator import Generator
from tests.generation.test_adjustments import adjusted
from tests.generation.test_sampling import Options, bound, chi_square, reference
from tests.support.checkpoints import random_tensors, tiny_config, write_checkpoint
from tests.support.running import forward, optimized

pytestmark = pytest.mark.slow

W, BATCH, CALLS = 8, 4096, 13
PROMPT = [2, 3, 5, 6, 2, 3]  # the n-gram drafter proposes 5 6, which followed 2 3
SETTINGS: list[Options] = [
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.6, "top_p": 0.8},
]


def load_small(directory: Path, vocab_size: int = W) -> DeepSeekV3:
    """Returns a model with a small vocabulary and an MTP layer."""
    config = tiny_config(
        vocab_size=vocab_size,
        hidden_size=16,
        num_hidden_layers=1,
        first_k_dense_replace=1,
        intermediate_size=24,
        moe_intermediate_size=8,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=4,
        qk_rope_head_dim=4,
        v_head_dim=4,
    )
    write_checkpoint(directory, config, random_tensors(config, seed=5))
    return dsv3_jax.load(directory)[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> DeepSeekV3:
    return load_small(tmp_path_factory.mktemp("eight"))


@pytest.fixture(scope="module")
def generator(model) -> Generator:
    return optimized(Generator(model, None, 16, batch_sizes=(BATCH,), prefill_chunk=4))


Adjust = Callable[[np.ndarray, list[int]], np.ndarray]


def exact_probabilities(
    model: DeepSeekV3,
    options: Options,
    adjust: Adjust = lambda logits, generated: logits,
    prompt: list[int] = PROMPT,
) -> np.ndarray:
    """Returns P(first token, second token) [W, W] in float64, from whole forward passes.

    Args:
      adjust: returns logits after adjustments, from logits and the tokens generated before.
    """

    def filtered(logits: np.ndarray, generated: list[int]) -> np.ndarray:
        scaled = adjust(logits.astype(np.float64), generated) / options["temperature"]
        keep, margin = reference(scaled.astype(np.float32), options)
        assert margin > 1e-4, "too close to a threshold for float32"
        weights = np.where(keep, np.exp(scaled - scaled.max()), 0.0)
        return weights / weights.sum()

    prompts = [[*prompt, first] for first in range(W)]
    logits = np.asarray(forward(model, prompts)[0])
    first = filtered(logits[0, -2], [])
    return first[:, None] * np.stack([filtered(logits[t, -1], [t]) for t in range(W)])


def count_pairs(
    generator: Generator,
    options: Options,
    draft: str,
    depth: int | str = 2,
    calls: int = CALLS,
    **adjustments: Any,
) -> tuple[np.ndarray, float]:
    """Generates many times. Returns the count of each pair, and the acceptance rate."""
    pairs = np.zeros((W, W), int)
    drafted = accepted = 0
    for call in range(calls):
        seeds = range(call * BATCH, (call + 1) * BATCH)
        out = generator.generate(
            [PROMPT] * BATCH,
            max_new_tokens=3,
            ignore_eos=True,
            seed=seeds,
            draft=draft,
            draft_depth=depth,
            **options,
            **adjustments,
        )
        for completion in out:
            pairs[completion.tokens[0], completion.tokens[1]] += 1
        drafted += out.stats.drafted
        accepted += out.stats.accepted
    return pairs, accepted / drafted if drafted else 0.0


def check_lossless(pairs: np.ndarray, joint: np.ndarray) -> None:
    """Checks the counts of possible pairs by a chi-square test, with rare pairs pooled."""
    assert not pairs[joint == 0].any()
    expected = joint * pairs.sum()
    common = expected > 10
    counts = np.append(pairs[common], pairs[~common].sum())
    probabilities = np.append(joint[common], joint[~common].sum())
    if probabilities[-1] * pairs.sum() < 10:
        counts, probabilities = counts[:-1], probabilities[:-1] / probabilities[:-1].sum()
    assert len(counts) > 13
    assert chi_square(counts, probabilities) < bound(len(counts) - 1)


# Each drafter and each setting at least once. test_verification.py tests the distribution of each
# kind of draft under more settings.
CASES = [
    ("mtp", 2, SETTINGS[1]),
    ("mtp", "auto", SETTINGS[0]),  # depths depend on acceptance and measured times
    ("ngram", 2, SETTINGS[0]),
]


@pytest.mark.parametrize(("draft", "depth", "options"), CASES, ids=str)
def test_joint_of_two_tokens(model, generator, draft, depth, options):
    joint = exact_probabilities(model, options)
    pairs, acceptance = count_pairs(generator, options, draft, depth)
    assert pairs.sum() == CALLS * BATCH
    check_lossless(pairs, joint)
    assert 0.05 < acceptance < 0.95, "nothing would be tested"


def test_joint_of_two_tokens_with_penalties(model, generator):
    adjustments: dict[str, Any] = {
        "presence_penalty": -0.6,
        "frequency_penalty": -0.8,
        "repetition_penalty": 0.7,
        "logit_bias": {3: 0.5, 6: -0.4},
    }
    options: Options = {"temperature": 1.0, "top_p": 0.97}

    def adjust(logits: np.ndarray, generated: list[int]) -> np.ndarray:
        return adjusted(logits, generated, prompt=PROMPT, **adjustments)

    joint = exact_probabilities(model, options, adjust)
    assert np.abs(joint - exact_probabilities(model, options)).max() > 0.01
    pairs, acceptance = count_pairs(generator, options, "mtp", 2, calls=10, **adjustments)
    check_lossless(pairs, joint)
    assert 0.05 < acceptance < 0.95, "nothing would be tested"


def test_accepting_always_fails_it(model, generator):
    """A deliberate defect fails the same check: all drafts of the MTP layer are accepted."""
    options = SETTINGS[0]
    joint = exact_probabilities(model, options)
    pairs, _ = count_pairs(generator, options, "synthetic:1", calls=5)
    possible = np.where(joint > 0, pairs, 0)  # without impossible pairs, which alone would fail
    for seen in (pairs, possible):
        with pytest.raises(AssertionError):
            check_lossless(seen, joint)
