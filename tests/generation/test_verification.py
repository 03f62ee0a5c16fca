"""Speculative sampling on known distributions: for any q, tokens are distributed as p."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3_jax.generation.drafters import Drafts
from dsv3_jax.generation.sampling import DRAFT, Sampling, filter_logits, sample
from dsv3_jax.generation.selection import verify
from tests.generation.packing import pack_sampling
from tests.generation.test_sampling import Options, bound, chi_square, run_sample, sampling
from tests.support.covering import slow_except

N, W, K = 60_000, 6, 2
RNG = np.random.default_rng(0)
TARGET = (1.5 * RNG.standard_normal((K + 1, W))).astype(np.float32)
OTHER = (1.5 * RNG.standard_normal((K, W))).astype(np.float32)
DRAFTERS = {
    "unlike": OTHER,
    "alike": TARGET[:K] + 0.3 * OTHER,
    "equal": TARGET[:K],
    "never right": np.where(TARGET[:K] == TARGET[:K].min(axis=-1, keepdims=True), 0, -50.0),
    "certain": None,
}
SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.85},
    {"temperature": 2.0, "top_k": 3},
    {"temperature": 1.2, "min_p": 0.2},
]


run_filtered = jax.jit(filter_logits)
run_verify = jax.jit(verify, static_argnums=4)


def repeated(options: Options, count: int = N) -> Sampling:
    """Settings of ``count`` sequences that differ in their seeds only."""
    names = [field.name for field in dataclasses.fields(Sampling) if field.name != "mode"]
    columns = {name: getattr(sampling([options]), name) for name in names}
    batch = {name: np.repeat(np.asarray(column), count, axis=0) for name, column in columns.items()}
    return pack_sampling(**batch | {"seed": np.arange(count)})


@jax.jit
def sample_drafts(logits: jax.Array, settings: Sampling) -> tuple[jax.Array, jax.Array]:
    positions = jnp.full(logits.shape[0], 9)
    sampled = [sample(logits[:, k], settings, positions + k, DRAFT) for k in range(K)]
    tokens, filtered = zip(*sampled, strict=True)
    return jnp.stack(tokens, axis=1), jnp.stack(filtered, axis=1)


def drafts_of(logits: np.ndarray | None, settings: Sampling) -> Drafts:
    """Drafts like a drafter's: sampled with the same settings, or constant for logits of None."""
    counts = jnp.array(np.full(N, K, np.int32))
    if logits is None:
        return Drafts(jnp.array(np.tile(np.array([[2, 4]], np.int32), (N, 1))), counts, None)
    batch = jnp.array(np.tile(np.asarray(logits, np.float32), (N, 1, 1)))
    tokens, filtered = sample_drafts(batch, settings)
    return Drafts(tokens, counts, filtered)


def run(
    drafts: Drafts, settings: Sampling, acceptance: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Verifies N sequences. Returns their tokens and numbers of accepted drafts."""
    logits, positions = np.tile(TARGET, (N, 1, 1)), np.full(N, 9, np.int32)
    tokens, accepted = run_verify(
        jnp.array(logits), drafts, settings, jnp.array(positions), acceptance
    )
    return np.asarray(tokens), np.asarray(accepted)


@functools.cache
def verified(drafter: str, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Result of one of DRAFTERS under one of SETTINGS."""
    batch = repeated(SETTINGS[number])
    return run(drafts_of(DRAFTERS[drafter], batch), batch)


def probabilities(options: Options, logits: np.ndarray) -> np.ndarray:
    """Filtered probabilities of logits [positions, W]."""
    padded = np.zeros((1, K + 1, W), np.float32)
    padded[0, : len(logits)] = logits
    filtered = np.asarray(run_filtered(jnp.array(padded), repeated(options, 1)))[0, : len(logits)]
    weights = np.exp(filtered - filtered.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


class TestDistribution:
    @pytest.mark.parametrize(
        ("drafter", "number"),
        [
            # The quick suite has every drafter once and every setting at least once.
            pytest.param(
                drafter,
                number,
                id=f"{drafter}-{SETTINGS[number]}",
                marks=() if i % len(SETTINGS) == number else pytest.mark.slow,
            )
            for i, drafter in enumerate(DRAFTERS)
            for number in range(len(SETTINGS))
        ],
    )
    def test_each_position_follows_the_model(self, drafter, number):
        """A token at a position that the step reaches is distributed as p. It is independent of the
        token before, because the logits of this test are."""
        tokens, accepted = verified(drafter, number)
        p = probabilities(SETTINGS[number], TARGET)
        for position in range(K + 1):
            reached = accepted >= position
            if reached.sum() < 500:
                continue
            counts = np.bincount(tokens[reached, position], minlength=W)
            keep = p[position] > 0
            assert not counts[~keep].any()
            keep &= p[position] * counts.sum() > 5
            assert chi_square(counts[keep], p[position][keep] / p[position][keep].sum()) < bound(
                int(keep.sum()) - 1
            )

    @pytest.mark.parametrize(
        "number",
        slow_except(range(len(SETTINGS)), quick=(1,)),
        ids=[str(options) for options in SETTINGS],
    )
    def test_acceptance_is_the_overlap(self, number):
        """A draft is accepted with probability sum min(p, q), the maximum for any rule."""
        options = SETTINGS[number]
        for drafter, logits in DRAFTERS.items():
            _, accepted = verified(drafter, number)
            p = probabilities(options, TARGET)[0]
            q = np.eye(W)[2] if logits is None else probabilities(options, logits)[0]
            overlap = np.minimum(p, q).sum()
            assert (accepted >= 1).mean() == pytest.approx(overlap, abs=0.01)

    @pytest.mark.slow
    def test_accepting_always_is_seen(self):
        """A deliberate defect, which the same test detects."""
        options = SETTINGS[0]
        batch = repeated(options)
        tokens, accepted = run(drafts_of(OTHER, batch), batch, acceptance=1.0)
        assert (accepted == K).all()
        p = probabilities(options, TARGET)
        counts = np.bincount(tokens[:, 0], minlength=W)
        assert chi_square(counts, p[0]) > 10 * bound(W - 1)

    @pytest.mark.slow
    def test_without_drafts_it_is_sampling(self):
        """Bit for bit, so that a seed has the same meaning in both."""
        none = Drafts(jnp.zeros((500, 0), jnp.int32), jnp.zeros(500, jnp.int32), None)
        logits, positions = np.tile(TARGET[:1], (500, 1, 1)), np.full(500, 9, np.int32)
        for options in (*SETTINGS, {"temperature": 0.0}):
            batch = repeated(options, 500)
            tokens, accepted = run_verify(jnp.array(logits), none, batch, jnp.array(positions))
            own = run_sample(jnp.array(logits[:, 0]), batch, jnp.array(positions))
            np.testing.assert_array_equal(np.asarray(tokens)[:, 0], own)
            assert not np.asarray(accepted).any()


class TestGreedy:
    BEST = TARGET.argmax(axis=-1)

    @pytest.mark.parametrize("last_temperature", [0.0, 1.0], ids=["greedy batch", "mixed batch"])
    def test_accepts_while_equal(self, last_temperature):
        wrong = (self.BEST + 1) % W
        draft_tokens = np.array(
            [self.BEST[:2], [self.BEST[0], wrong[1]], [wrong[0], self.BEST[1]], wrong[:2]] * 2,
            np.int32,
        )
        counts = np.array([2, 2, 2, 2, 1, 1, 0, 0], np.int32)
        times = N // 8  # repeats the eight, to use the same compiled program
        batch = pack_sampling(
            temperature=np.tile([0.0] * 7 + [last_temperature], times),
            seed=np.arange(N),
            stop_tokens=np.full((N, 8), -1),
        )
        # At temperature 0, the filters leave the draft alone.
        logits = np.where(np.arange(W) == draft_tokens[..., None], np.float32(0), -np.inf)
        for draft_logits in (None, jnp.array(np.tile(logits, (times, 1, 1)))):
            tokens = jnp.array(np.tile(draft_tokens, (times, 1)))
            drafts = Drafts(tokens, jnp.array(np.tile(counts, times)), draft_logits)
            tokens, accepted = (x.reshape(times, 8, *x.shape[1:]) for x in run(drafts, batch))
            assert (accepted[:, :7] == [2, 1, 0, 0, 1, 1, 0]).all()
            for b in range(7):
                n = accepted[0, b] + 1
                assert (tokens[:, b, :n] == self.BEST[:n]).all()


class TestSynthetic:
    @pytest.mark.slow
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize(
        "rate", [0.3, 1.0, *(pytest.param(rate, marks=pytest.mark.slow) for rate in (0.0, 0.85))]
    )
    def test_rate(self, rate, temperature):
        batch = repeated({"temperature": temperature})
        drafts = drafts_of(DRAFTERS["never right"], batch)
        tokens, accepted = run(drafts, batch, acceptance=rate)
        assert (accepted >= 1).mean() == pytest.approx(rate, abs=0.01)
        assert (accepted == 2).mean() == pytest.approx(rate**2, abs=0.01)
        is_accepted = np.arange(K) < accepted[:, None]
        np.testing.assert_array_equal(
            tokens[:, :K][is_accepted], np.asarray(drafts.tokens)[is_accepted]
        )

    def test_own_token_follows_the_model(self):
        batch = repeated({})
        tokens, accepted = run(drafts_of(OTHER, batch), batch, acceptance=0.3)
        p = probabilities({}, TARGET)
        for position in range(K + 1):
            own = tokens[accepted == position, position]
            assert chi_square(np.bincount(own, minlength=W), p[position]) < bound(W - 1)
