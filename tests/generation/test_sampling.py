"""Sampling: filters against a reference, tokens against their distribution, and batches."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3_jax.generation.sampling import Sampling, SamplingMode, filter_mask, sample
from tests.generation.packing import pack_sampling

Options = dict[str, Any]

run_filter_mask = jax.jit(filter_mask)
run_sample = jax.jit(lambda *arguments: sample(*arguments)[0])


def sampling(batch: list[Options]) -> Sampling:
    """Packs the settings of a batch. The defaults are temperature 1 and no filter."""
    default = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}
    columns = {n: np.array([options.get(n, d) for options in batch]) for n, d in default.items()}
    return pack_sampling(stop_tokens=np.full((len(batch), 8), -1), **columns)


def sample_tokens(logits: np.ndarray, batch: list[Options], positions: Any) -> np.ndarray:
    return np.asarray(
        run_sample(
            jnp.asarray(logits, jnp.float32), sampling(batch), jnp.asarray(positions, jnp.int32)
        )
    )


def reference(logits: np.ndarray, options: Options) -> tuple[np.ndarray, float]:
    """Returns the mask of tokens that pass the filters, and the minimum distance to a threshold, in
    float64."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = order[: options.get("top_k", 0) or len(order)]
    weights = [math.exp(logits[i] - logits[order[0]]) for i in order]
    top_p, min_p = options.get("top_p", 1.0), options.get("min_p", 0.0)
    keep = np.zeros(len(logits), bool)
    margin, before = math.inf, 0.0
    for i, weight in zip(order, weights, strict=True):
        inside = i == order[0] or top_p == 1.0 or before < top_p
        keep[i] = inside and (i == order[0] or weight >= min_p)
        if i != order[0]:
            margin = min(margin, abs(before - top_p) if top_p < 1 else margin)
            margin = min(margin, abs(weight - min_p) if min_p and weight != 1 else margin)
        before += weight / sum(weights)
    return keep, margin


class TestFilterMask:
    def test_random_settings(self):
        rng = np.random.default_rng(0)
        W = 40
        batch: list[Options] = []
        logits = []
        while len(batch) < 400:
            options: Options = {}
            if rng.random() < 0.6:
                options["top_k"] = int(rng.choice([0, 1, 2, 5, 17, W - 1, W, W + 1, 10**6]))
            if rng.random() < 0.6:
                options["top_p"] = float(
                    rng.choice([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0, rng.random()])
                )
            if rng.random() < 0.6:
                options["min_p"] = float(rng.choice([0.0, 1e-4, 0.05, 0.3, 1.0, rng.random()]))
            values = rng.standard_normal(W) * rng.choice([0.1, 1.0, 4.0])
            if rng.random() < 0.4:
                values = np.round(values)  # many ties
            values = values.astype(np.float32)
            if reference(values, options)[1] > 1e-5:  # closer ones are ambiguous in float32
                batch.append(options)
                logits.append(values)
        got = np.asarray(run_filter_mask(jnp.asarray(np.stack(logits)), sampling(batch)))
        for values, options, keep in zip(logits, batch, got, strict=True):
            np.testing.assert_array_equal(keep, reference(values, options)[0], err_msg=str(options))
        # The settings are not all trivial.
        assert len({int(keep.sum()) for keep in got}) > 20

    @pytest.mark.parametrize(
        ("logits", "options", "expected"),
        [
            ([0, 0, 0, 0], {"top_k": 2}, [0, 1]),  # ties: lower ids first
            ([0, 2, 2, 1], {"top_k": 1}, [1]),
            ([0, 2, 2, 1], {"top_k": 3}, [1, 2, 3]),
            ([3, 1, 2, 0], {"top_k": 4}, [0, 1, 2, 3]),
            ([3, 1, 2, 0], {"top_k": 2**31 - 1}, [0, 1, 2, 3]),
            ([0, 0, 0, 0], {"top_p": 0.5}, [0, 1]),  # exactly half is enough
            ([0, 0, 0, 0], {"top_p": 0.51}, [0, 1, 2]),
            ([0, 0, 0, 0], {"top_p": 1e-9}, [0]),
            ([0, 2, 2, 1], {"top_p": 1e-60}, [1]),  # 0 in float32
            ([50, 0, -50, -90], {"top_p": 1.0}, [0, 1, 2, 3]),  # the sum is 1 after the first
            ([50, 0, -50, -90], {"top_p": 0.9999}, [0]),
            ([0, -90, 0, -1], {"min_p": 0.0}, [0, 1, 2, 3]),
            ([0, -90, 0, -1], {"min_p": 1.0}, [0, 2]),  # all of the most probable
            ([0, -90, 0, -1], {"min_p": 0.3}, [0, 2, 3]),
            # In order: top_k keeps two of equal probability, then top_p keeps the first of them.
            ([0, 0, 0, 0], {"top_k": 2, "top_p": 0.5}, [0]),
            # min_p is relative to the most probable token, not to the tokens that top_p kept.
            ([2, 1, 0, 0], {"top_p": 0.7, "min_p": 0.5}, [0]),
        ],
    )
    def test_by_hand(self, logits, options, expected):
        keep = run_filter_mask(jnp.asarray([logits], jnp.float32), sampling([options]))
        assert np.flatnonzero(keep[0]).tolist() == expected


# P(chi2_df >= df + 2 sqrt(df x) + 2 x) <= exp(-x) (Laurent and Massart 2000, lemma 1): a correct
# sampler passes one comparison with probability 1 - 1e-6. Seeds are fixed.
UNLIKELY = math.log(1e6)


def bound(df: int) -> float:
    return df + 2 * math.sqrt(df * UNLIKELY) + 2 * UNLIKELY


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = counts.sum() * probabilities
    assert expected.min() > 5, "too few samples for the approximation"
    return float(((counts - expected) ** 2 / expected).sum())


class TestDistribution:
    N = 20_000
    LOGITS = np.array([1.0, -0.5, 0.3, 2.0, -1.0, 0.9, 1.1, -0.2, 0.0, 1.6, -0.7, 0.5], np.float32)

    @pytest.mark.parametrize("vary", ["seed", "position"])
    @pytest.mark.parametrize(
        "options",
        [
            {"temperature": 2.0},
            {"temperature": 0.6},
            {"temperature": 0.5, "top_k": 5},
            {"temperature": 1.3, "top_p": 0.75},
            {"temperature": 0.9, "min_p": 0.15},
            {"temperature": 1.2, "top_k": 9, "top_p": 0.9, "min_p": 0.2},
        ],
        ids=str,
    )
    def test_follows_the_filtered_softmax(self, options, vary):
        numbers = np.arange(self.N)
        fixed = np.full(self.N, 7)
        seeds, positions = (numbers, fixed) if vary == "seed" else (fixed, numbers)
        tokens = sample_tokens(
            np.tile(self.LOGITS, (self.N, 1)),
            [{**options, "seed": int(s)} for s in seeds],
            positions,
        )
        counts = np.bincount(tokens, minlength=len(self.LOGITS))
        scaled = self.LOGITS / np.float32(options["temperature"])
        keep, _ = reference(scaled, options)
        assert not counts[~keep].any()

        def deviation(temperature: float) -> float:
            weights = np.exp(self.LOGITS[keep].astype(np.float64) / temperature)
            return chi_square(counts[keep], weights / weights.sum())

        assert deviation(options["temperature"]) < bound(int(keep.sum()) - 1)
        # There are enough samples to detect a temperature that is a quarter higher.
        assert deviation(1.25 * options["temperature"]) > bound(int(keep.sum()) - 1)

    def test_neighbouring_positions_are_independent(self):
        logits = np.tile(self.LOGITS[:4], (self.N, 1))
        tokens = sample_tokens(logits, [{"seed": 3}] * self.N, np.arange(self.N))
        pairs = np.bincount(4 * tokens[::2] + tokens[1::2], minlength=16)
        p = np.exp(self.LOGITS[:4].astype(np.float64))
        p /= p.sum()
        assert chi_square(pairs, np.outer(p, p).ravel()) < bound(15)


def random_options(rng: np.random.Generator) -> Options:
    return {
        "temperature": float(rng.choice([0.0, 0.5, 1.0, 3.0])),
        "top_k": int(rng.choice([0, 3, 20])),
        "top_p": float(rng.choice([0.3, 0.9, 1.0])),
        "min_p": float(rng.choice([0.0, 0.1])),
        "seed": int(rng.integers(0, 2**32)),
    }


class TestBatches:
    B, W = 24, 50

    @pytest.fixture(autouse=True)
    def random_batch(self):
        rng = np.random.default_rng(5)
        self.logits = rng.standard_normal((self.B, self.W)).astype(np.float32) * 2
        self.positions = rng.integers(0, 2**20, self.B)
        self.settings = [random_options(rng) for _ in range(self.B)]

    def test_greedy_sequences_of_a_mixed_batch(self):
        logits = self.logits.copy()
        logits[:, [9, 30]] = (
            logits.max(axis=1, keepdims=True) + 1
        )  # a tie: the lower id is selected
        is_greedy = [options["temperature"] == 0 for options in self.settings]
        assert 0 < sum(is_greedy) < self.B
        tokens = sample_tokens(logits, self.settings, self.positions)
        assert (tokens[is_greedy] == 9).all()
        assert (tokens[~np.array(is_greedy)] != 9).any()

    def test_greedy_batch(self):
        tokens = sample_tokens(self.logits, [{"temperature": 0.0}] * self.B, self.positions)
        np.testing.assert_array_equal(tokens, self.logits.argmax(axis=1))

    def test_index_and_batch_size_do_not_matter(self):
        together = sample_tokens(self.logits, self.settings, self.positions)
        order = np.random.default_rng(1).permutation(self.B)
        moved = sample_tokens(
            self.logits[order], [self.settings[b] for b in order], self.positions[order]
        )
        np.testing.assert_array_equal(moved, together[order])
        alone = [
            sample_tokens(self.logits[b : b + 1], [self.settings[b]], self.positions[b : b + 1])[0]
            for b in range(self.B)
        ]
        np.testing.assert_array_equal(alone, together)

    def test_seed_and_position_matter(self):
        logits = np.zeros((1000, self.W), np.float32)
        seeds = sample_tokens(logits, [{"seed": s} for s in range(1000)], np.zeros(1000))
        positions = sample_tokens(logits, [{"seed": 0}] * 1000, np.arange(1000))
        same = sample_tokens(logits, [{"seed": 11}] * 1000, np.full(1000, 4))
        assert len(set(seeds.tolist())) == len(set(positions.tolist())) == self.W
        assert len(set(same.tolist())) == 1

    def test_seeds_use_all_32_bits(self):
        seeds = [0, 1, 2**31, 2**32 - 1, 2**16]
        logits = np.zeros((len(seeds), 10_000), np.float32)
        tokens = sample_tokens(logits, [{"seed": s} for s in seeds], np.zeros(len(seeds)))
        assert len(set(tokens.tolist())) == len(seeds)

    @pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-37, 1e-30, 1e-3, 1.0, 1e3, 3.4e38])
    def test_padding_of_the_vocabulary_is_never_chosen(self, temperature):
        vocab_size = 20
        logits = 100 + self.logits
        logits[:, vocab_size:] = -np.inf
        batch = [{**options, "temperature": temperature} for options in self.settings]
        tokens = sample_tokens(logits, batch, self.positions)
        assert tokens.max() < vocab_size
        if temperature <= 1e-3:  # equivalent to greedy, without overflow
            np.testing.assert_array_equal(tokens, logits.argmax(axis=1))


@pytest.mark.parametrize("temperature", [1e37, 9e37, 3.4e38])
def test_the_highest_temperatures_sample_evenly(temperature):
    """Their reciprocals are subnormal and flushed to zero, and -inf times zero is NaN."""
    logits = np.where(np.arange(8) < 5, np.linspace(-3, 3, 8), -np.inf).astype(np.float32)
    batch = [{"temperature": temperature, "seed": seed} for seed in range(64)]
    tokens = sample_tokens(np.tile(logits, (64, 1)), batch, np.zeros(64, int))
    assert set(tokens) == set(range(5))


def test_by_default_sampling_is_greedy_and_never_stops():
    sampling = pack_sampling(seed=np.arange(3))
    assert not sampling.temperature.any()
    assert sampling.seed.tolist() == [0, 1, 2]
    assert sampling.top_p.tolist() == [1.0] * 3
    assert sampling.stop_tokens.tolist() == [[-1]] * 3


class TestMode:
    """A static mode gives the tokens that the branch gives, and leaves no branch."""

    logits = np.random.default_rng(5).normal(size=(6, 40)).astype(np.float32)
    positions = np.arange(6)

    def sample(self, mode: SamplingMode | None, temperatures: list[float]) -> jax.Array:
        batch = sampling([{"temperature": t, "seed": i} for i, t in enumerate(temperatures)])
        settings = dataclasses.replace(batch, mode=mode)
        return sample(jnp.asarray(self.logits), settings, jnp.asarray(self.positions))[0]

    @pytest.mark.parametrize(
        ("mode", "temperatures"),
        [
            ("greedy", [0.0] * 6),
            ("unfiltered", [0.0, 0.7, 0.0, 1.5, 1.0, 0.0]),
            ("sampled", [0.0] * 6),
            ("sampled", [0.0, 0.7, 0.0, 1.5, 1.0, 0.0]),
        ],
    )
    def test_tokens(self, mode, temperatures):
        expected = self.sample(None, temperatures)
        np.testing.assert_array_equal(self.sample(mode, temperatures), expected)

    @pytest.mark.parametrize(
        ("mode", "operations"),
        [
            (None, {"cond", "sort"}),
            ("sampled", {"sort"}),
            ("unfiltered", set()),
            ("greedy", set()),
        ],
    )
    def test_operations(self, mode, operations):
        program = str(jax.make_jaxpr(lambda: self.sample(mode, [1.0] * 6))())
        assert {name for name in ("cond", "sort") if f" {name}[" in program} == operations
