"""The rule that accepts drafts, on distributions that are known: nothing is lost, whatever q is."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3_jax.generation.drafters import Drafts
from dsv3_jax.generation.sampling import DRAFT, Sampling, filter_logits, sample
from dsv3_jax.generation.verification import verify
from tests.generation.test_sampling import Row, bound, chi_square, run_sample, sampling
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


def settings(row: Row, count: int = N) -> Sampling:
    """That many rows which differ in their seeds alone."""
    columns = {f.name: getattr(sampling([row]), f.name) for f in dataclasses.fields(Sampling)}
    rows = {name: np.repeat(np.asarray(column), count, axis=0) for name, column in columns.items()}
    return Sampling.pack(**rows | {"seed": np.arange(count)})


@jax.jit
def drawn(logits: jax.Array, settings: Sampling) -> jax.Array:
    positions = jnp.full(logits.shape[0], 9)
    places = [sample(logits[:, k], settings, positions + k, DRAFT) for k in range(K)]
    return jnp.stack(places, axis=1)


def drafts_of(logits: np.ndarray | None, settings: Sampling) -> Drafts:
    """As a drafter makes them: drawn under the row's own settings, or one certain token."""
    counts = jnp.array(np.full(N, K, np.int32))
    if logits is None:
        return Drafts(jnp.array(np.tile(np.array([[2, 4]], np.int32), (N, 1))), counts, None)
    rows = jnp.array(np.tile(np.asarray(logits, np.float32), (N, 1, 1)))
    return Drafts(drawn(rows, settings), counts, rows)


def run(
    drafts: Drafts, settings: Sampling, acceptance: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and accepted drafts of N rows: one program for each way to draft and each rate."""
    logits, positions = np.tile(TARGET, (N, 1, 1)), np.full(N, 9, np.int32)
    tokens, accepted = run_verify(
        jnp.array(logits), drafts, settings, jnp.array(positions), acceptance
    )
    return np.asarray(tokens), np.asarray(accepted)


@functools.cache
def verified(drafter: str, number: int) -> tuple[np.ndarray, np.ndarray]:
    """What comes of a drafter of DRAFTERS under one of SETTINGS."""
    rows = settings(SETTINGS[number])
    return run(drafts_of(DRAFTERS[drafter], rows), rows)


def probabilities(row: Row, logits: np.ndarray) -> np.ndarray:
    """Of logits [places, W]."""
    padded = np.zeros((1, K + 1, W), np.float32)
    padded[0, : len(logits)] = logits
    kept = np.asarray(run_filtered(jnp.array(padded), settings(row, 1)))[0, : len(logits)]
    weights = np.exp(kept - kept.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


class TestDistribution:
    @pytest.mark.parametrize(
        ("drafter", "number"),
        [
            # In the quick suite every drafter once and every setting at least once.
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
    def test_each_place_follows_the_model(self, drafter, number):
        """Given that a step reaches a place, its token is distributed as the model says, and
        independent of the one before: here the model's logits do not depend on it."""
        tokens, accepted = verified(drafter, number)
        p = probabilities(SETTINGS[number], TARGET)
        for place in range(K + 1):
            reached = accepted >= place
            if reached.sum() < 500:
                continue
            counts = np.bincount(tokens[reached, place], minlength=W)
            keep = p[place] > 0
            assert not counts[~keep].any()
            keep &= p[place] * counts.sum() > 5
            assert chi_square(counts[keep], p[place][keep] / p[place][keep].sum()) < bound(
                int(keep.sum()) - 1
            )

    @pytest.mark.parametrize(
        "number",
        slow_except(range(len(SETTINGS)), quick=(1,)),
        ids=[str(row) for row in SETTINGS],
    )
    def test_acceptance_is_the_overlap(self, number):
        """A draft stays with probability sum min(p, q); no rule accepts more."""
        row = SETTINGS[number]
        for drafter, logits in DRAFTERS.items():
            _, accepted = verified(drafter, number)
            p = probabilities(row, TARGET)[0]
            q = np.eye(W)[2] if logits is None else probabilities(row, logits)[0]
            overlap = np.minimum(p, q).sum()
            assert (accepted >= 1).mean() == pytest.approx(overlap, abs=0.01)

    @pytest.mark.slow
    def test_accepting_always_is_seen(self):
        """The planted bug: the same test tells it from the rule."""
        row = SETTINGS[0]
        rows = settings(row)
        tokens, accepted = run(drafts_of(OTHER, rows), rows, acceptance=1.0)
        assert (accepted == K).all()
        p = probabilities(row, TARGET)
        counts = np.bincount(tokens[:, 0], minlength=W)
        assert chi_square(counts, p[0]) > 10 * bound(W - 1)

    @pytest.mark.slow
    def test_without_drafts_it_is_sampling(self):
        """To the bit, so that a seed means the same with and without the machinery."""
        none = Drafts(jnp.zeros((500, 0), jnp.int32), jnp.zeros(500, jnp.int32), None)
        logits, positions = np.tile(TARGET[:1], (500, 1, 1)), np.full(500, 9, np.int32)
        for row in (*SETTINGS, {"temperature": 0.0}):
            rows = settings(row, 500)
            tokens, accepted = run_verify(jnp.array(logits), none, rows, jnp.array(positions))
            own = run_sample(jnp.array(logits[:, 0]), rows, jnp.array(positions))
            np.testing.assert_array_equal(np.asarray(tokens)[:, 0], own)
            assert not np.asarray(accepted).any()


class TestGreedy:
    BEST = TARGET.argmax(axis=-1)

    @pytest.mark.parametrize("company", [0.0, 1.0], ids=["greedy batch", "mixed batch"])
    def test_accepts_while_equal(self, company):
        wrong = (self.BEST + 1) % W
        offered = np.array(
            [self.BEST[:2], [self.BEST[0], wrong[1]], [wrong[0], self.BEST[1]], wrong[:2]] * 2,
            np.int32,
        )
        counts = np.array([2, 2, 2, 2, 1, 1, 0, 0], np.int32)
        times = N // 8  # the eight over and over: no program of their own
        rows = Sampling.pack(
            temperature=np.tile([0.0] * 7 + [company], times),
            top_k=np.zeros(N),
            top_p=np.ones(N),
            min_p=np.zeros(N),
            seed=np.arange(N),
            stop_tokens=np.full((N, 8), -1),
        )
        # Greedy drafts are the best of what they are drawn from.
        logits = np.tile(TARGET[:2], (8, 1, 1))
        logits = np.where(np.arange(W) == offered[..., None], np.float32(9), logits)
        for drawn_from in (None, jnp.array(np.tile(logits, (times, 1, 1)))):
            tokens = jnp.array(np.tile(offered, (times, 1)))
            drafts = Drafts(tokens, jnp.array(np.tile(counts, times)), drawn_from)
            tokens, accepted = (x.reshape(times, 8, *x.shape[1:]) for x in run(drafts, rows))
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
        rows = settings({"temperature": temperature})
        drafts = drafts_of(DRAFTERS["never right"], rows)
        tokens, accepted = run(drafts, rows, acceptance=rate)
        assert (accepted >= 1).mean() == pytest.approx(rate, abs=0.01)
        assert (accepted == 2).mean() == pytest.approx(rate**2, abs=0.01)
        taken = np.arange(K) < accepted[:, None]
        np.testing.assert_array_equal(tokens[:, :K][taken], np.asarray(drafts.tokens)[taken])

    def test_own_token_follows_the_model(self):
        rows = settings({})
        tokens, accepted = run(drafts_of(OTHER, rows), rows, acceptance=0.3)
        p = probabilities({}, TARGET)
        for place in range(K + 1):
            own = tokens[accepted == place, place]
            assert chi_square(np.bincount(own, minlength=W), p[place]) < bound(W - 1)
