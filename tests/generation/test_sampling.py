"""Filters against a plain reference, draws against their distribution, rows against each other."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3_jax.generation.sampling import Sampling, filter_mask, sample

Row = dict[str, Any]

run_filter_mask = jax.jit(filter_mask)
run_sample = jax.jit(sample)


def sampling(rows: list[Row]) -> Sampling:
    """Settings by row; what a row does not name leaves all tokens at temperature 1."""
    default = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}
    columns = {n: np.array([row.get(n, d) for row in rows]) for n, d in default.items()}
    return Sampling.pack(stop_tokens=np.full((len(rows), 8), -1), **columns)


def draw(logits: np.ndarray, rows: list[Row], positions: Any) -> np.ndarray:
    return np.asarray(
        run_sample(
            jnp.asarray(logits, jnp.float32), sampling(rows), jnp.asarray(positions, jnp.int32)
        )
    )


def reference(logits: np.ndarray, row: Row) -> tuple[np.ndarray, float]:
    """The kept tokens of one row in float64, and the least distance of a token to a threshold."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = order[: row.get("top_k", 0) or len(order)]
    weights = [math.exp(logits[i] - logits[order[0]]) for i in order]
    top_p, min_p = row.get("top_p", 1.0), row.get("min_p", 0.0)
    keep = np.zeros(len(logits), bool)
    margin, before = math.inf, 0.0
    for i, weight in zip(order, weights, strict=True):
        inside = i == order[0] or top_p == 1.0 or before < top_p
        keep[i] = inside and (i == order[0] or weight >= min_p)
        if i != order[0]:
            margin = min(margin, abs(before - top_p) if top_p < 1 else margin)
            margin = min(margin, abs(weight - min_p) if weight != 1 else margin)
        before += weight / sum(weights)
    return keep, margin


class TestKept:
    def test_random_settings(self):
        rng = np.random.default_rng(0)
        W = 40
        rows: list[Row] = []
        logits = []
        while len(rows) < 400:
            row: Row = {}
            if rng.random() < 0.6:
                row["top_k"] = int(rng.choice([0, 1, 2, 5, 17, W - 1, W, W + 1, 10**6]))
            if rng.random() < 0.6:
                row["top_p"] = float(rng.choice([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0, rng.random()]))
            if rng.random() < 0.6:
                row["min_p"] = float(rng.choice([0.0, 1e-4, 0.05, 0.3, 1.0, rng.random()]))
            values = rng.standard_normal(W) * rng.choice([0.1, 1.0, 4.0])
            if rng.random() < 0.4:
                values = np.round(values)  # many ties
            values = values.astype(np.float32)
            if reference(values, row)[1] > 1e-5:  # float32 cannot settle what is closer
                rows.append(row)
                logits.append(values)
        got = np.asarray(run_filter_mask(jnp.asarray(np.stack(logits)), sampling(rows)))
        for values, row, keep in zip(logits, rows, got, strict=True):
            np.testing.assert_array_equal(keep, reference(values, row)[0], err_msg=str(row))
        # Not all rows may be trivial.
        assert len({int(keep.sum()) for keep in got}) > 20

    @pytest.mark.parametrize(
        ("logits", "row", "expected"),
        [
            ([0, 0, 0, 0], {"top_k": 2}, [0, 1]),  # equal ones: lower ids first
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
            ([0, -90, 0, -1], {"min_p": 1.0}, [0, 2]),  # all the most probable
            ([0, -90, 0, -1], {"min_p": 0.3}, [0, 2, 3]),
            # In order: top_k leaves two of equal weight, of which top_p takes the first alone.
            ([0, 0, 0, 0], {"top_k": 2, "top_p": 0.5}, [0]),
            # min_p compares with the best, whatever top_p left out.
            ([2, 1, 0, 0], {"top_p": 0.7, "min_p": 0.5}, [0]),
        ],
    )
    def test_by_hand(self, logits, row, expected):
        keep = run_filter_mask(jnp.asarray([logits], jnp.float32), sampling([row]))
        assert np.flatnonzero(keep[0]).tolist() == expected


# P(chi2_df >= df + 2 sqrt(df x) + 2 x) <= exp(-x) (Laurent and Massart 2000, lemma 1): a right
# sampler passes one comparison with probability 1 - 1e-6, and seeds are fixed besides.
UNLIKELY = math.log(1e6)


def bound(df: int) -> float:
    return df + 2 * math.sqrt(df * UNLIKELY) + 2 * UNLIKELY


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = counts.sum() * probabilities
    assert expected.min() > 5, "too few draws for the approximation"
    return float(((counts - expected) ** 2 / expected).sum())


class TestDistribution:
    N = 20_000
    LOGITS = np.array([1.0, -0.5, 0.3, 2.0, -1.0, 0.9, 1.1, -0.2, 0.0, 1.6, -0.7, 0.5], np.float32)

    @pytest.mark.parametrize("vary", ["seed", "position"])
    @pytest.mark.parametrize(
        "row",
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
    def test_follows_the_filtered_softmax(self, row, vary):
        numbers = np.arange(self.N)
        fixed = np.full(self.N, 7)
        seeds, positions = (numbers, fixed) if vary == "seed" else (fixed, numbers)
        tokens = draw(
            np.tile(self.LOGITS, (self.N, 1)), [{**row, "seed": int(s)} for s in seeds], positions
        )
        counts = np.bincount(tokens, minlength=len(self.LOGITS))
        scaled = self.LOGITS / np.float32(row["temperature"])
        keep, _ = reference(scaled, row)
        assert not counts[~keep].any()

        def deviation(temperature: float) -> float:
            weights = np.exp(self.LOGITS[keep].astype(np.float64) / temperature)
            return chi_square(counts[keep], weights / weights.sum())

        assert deviation(row["temperature"]) < bound(int(keep.sum()) - 1)
        # The draws are many enough to tell a temperature from one a quarter higher.
        assert deviation(1.25 * row["temperature"]) > bound(int(keep.sum()) - 1)

    def test_neighbouring_positions_are_independent(self):
        logits = np.tile(self.LOGITS[:4], (self.N, 1))
        tokens = draw(logits, [{"seed": 3}] * self.N, np.arange(self.N))
        pairs = np.bincount(4 * tokens[::2] + tokens[1::2], minlength=16)
        p = np.exp(self.LOGITS[:4].astype(np.float64))
        p /= p.sum()
        assert chi_square(pairs, np.outer(p, p).ravel()) < bound(15)


def random_row(rng: np.random.Generator) -> Row:
    return {
        "temperature": float(rng.choice([0.0, 0.5, 1.0, 3.0])),
        "top_k": int(rng.choice([0, 3, 20])),
        "top_p": float(rng.choice([0.3, 0.9, 1.0])),
        "min_p": float(rng.choice([0.0, 0.1])),
        "seed": int(rng.integers(0, 2**32)),
    }


class TestRows:
    B, W = 24, 50

    @pytest.fixture(autouse=True)
    def batch(self):
        rng = np.random.default_rng(5)
        self.logits = rng.standard_normal((self.B, self.W)).astype(np.float32) * 2
        self.positions = rng.integers(0, 2**20, self.B)
        self.settings = [random_row(rng) for _ in range(self.B)]

    def test_greedy_rows_of_a_mixed_batch(self):
        logits = self.logits.copy()
        logits[:, [9, 30]] = logits.max(axis=1, keepdims=True) + 1  # a tie: the lower id wins
        cold = [row["temperature"] == 0 for row in self.settings]
        assert 0 < sum(cold) < self.B
        tokens = draw(logits, self.settings, self.positions)
        assert (tokens[cold] == 9).all()
        assert (tokens[~np.array(cold)] != 9).any()

    def test_greedy_batch(self):
        tokens = draw(self.logits, [{"temperature": 0.0}] * self.B, self.positions)
        np.testing.assert_array_equal(tokens, self.logits.argmax(axis=1))

    def test_row_index_and_batch_size_do_not_matter(self):
        together = draw(self.logits, self.settings, self.positions)
        order = np.random.default_rng(1).permutation(self.B)
        moved = draw(self.logits[order], [self.settings[b] for b in order], self.positions[order])
        np.testing.assert_array_equal(moved, together[order])
        alone = [
            draw(self.logits[b : b + 1], [self.settings[b]], self.positions[b : b + 1])[0]
            for b in range(self.B)
        ]
        np.testing.assert_array_equal(alone, together)

    def test_seed_and_position_matter(self):
        logits = np.zeros((1000, self.W), np.float32)
        seeds = draw(logits, [{"seed": s} for s in range(1000)], np.zeros(1000))
        positions = draw(logits, [{"seed": 0}] * 1000, np.arange(1000))
        same = draw(logits, [{"seed": 11}] * 1000, np.full(1000, 4))
        assert len(set(seeds.tolist())) == len(set(positions.tolist())) == self.W
        assert len(set(same.tolist())) == 1

    def test_seeds_use_all_32_bits(self):
        seeds = [0, 1, 2**31, 2**32 - 1, 2**16]
        logits = np.zeros((len(seeds), 10_000), np.float32)
        tokens = draw(logits, [{"seed": s} for s in seeds], np.zeros(len(seeds)))
        assert len(set(tokens.tolist())) == len(seeds)

    @pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-37, 1e-30, 1e-3, 1.0, 1e3, 3.4e38])
    def test_padding_of_the_vocabulary_is_never_chosen(self, temperature):
        vocab_size = 20
        logits = 100 + self.logits
        logits[:, vocab_size:] = -np.inf
        rows = [{**row, "temperature": temperature} for row in self.settings]
        tokens = draw(logits, rows, self.positions)
        assert tokens.max() < vocab_size
        if temperature <= 1e-3:  # as good as greedy, and no overflow on the way
            np.testing.assert_array_equal(tokens, logits.argmax(axis=1))


@pytest.mark.parametrize("temperature", [1e37, 9e37, 3.4e38])
def test_the_hottest_rows_sample_evenly(temperature):
    """1 / temperature is subnormal there, and -inf times zero is NaN."""
    logits = np.where(np.arange(8) < 5, np.linspace(-3, 3, 8), -np.inf).astype(np.float32)
    rows = [{"temperature": temperature, "seed": seed} for seed in range(64)]
    tokens = draw(np.tile(logits, (64, 1)), rows, np.zeros(64, int))
    assert set(tokens) == set(range(5))


def test_by_default_sampling_is_greedy_and_never_stops():
    sampling = Sampling.pack(seed=np.arange(3))
    assert not sampling.any_sampled
    assert sampling.seed.tolist() == [0, 1, 2]
    assert sampling.top_p.tolist() == [1.0] * 3
    assert sampling.stop_tokens.tolist() == [[-1]] * 3
