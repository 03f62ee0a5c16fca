"""The rule that accepts drafts, on distributions that are known: nothing is lost, whatever q is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3_jax.generation.drafters import Drafts
from dsv3_jax.generation.sampling import DRAFT, Sampling, filtered, sample
from dsv3_jax.generation.verification import verify
from tests.generation.test_sampling import bound, chi_square, sampling

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


def settings(row: dict, count: int = N) -> Sampling:
    """That many rows which differ in their seeds alone."""
    rows = jax.tree.map(lambda column: jnp.repeat(column, count, axis=0), sampling([row]))
    return dataclasses.replace(rows, seed=jnp.arange(count, dtype=jnp.uint32))


def drafts_of(logits: np.ndarray | None, settings: Sampling, count: int = N) -> Drafts:
    """As a drafter makes them: drawn under the row's own settings, or one certain token."""
    counts = jnp.full(count, K)
    if logits is None:
        return Drafts(jnp.tile(jnp.array([[2, 4]]), (count, 1)), counts, None)
    rows = jnp.tile(jnp.asarray(logits, jnp.float32), (count, 1, 1))
    drawn = [sample(rows[:, k], settings, jnp.full(count, 9 + k), DRAFT) for k in range(K)]
    return Drafts(jnp.stack(drawn, axis=1), counts, rows)


def run(drafts: Drafts, settings: Sampling, acceptance: float | None = None):
    count = drafts.tokens.shape[0]
    logits = jnp.tile(TARGET, (count, 1, 1))
    tokens, accepted = jax.jit(verify, static_argnums=4)(
        logits, drafts, settings, jnp.full(count, 9), acceptance
    )
    return np.asarray(tokens), np.asarray(accepted)


def probabilities(row: dict, logits: np.ndarray) -> np.ndarray:
    one = settings(row, 1)
    return np.asarray(jax.nn.softmax(filtered(jnp.asarray(logits)[None], one)[0], axis=-1))


class TestDistribution:
    @pytest.mark.parametrize("row", SETTINGS, ids=str)
    @pytest.mark.parametrize("drafter", DRAFTERS)
    def test_each_place_follows_the_model(self, drafter, row):
        """Given that a step reaches a place, its token is distributed as the model says, and
        independent of the one before: here the model's logits do not depend on it."""
        rows = settings(row)
        tokens, accepted = run(drafts_of(DRAFTERS[drafter], rows), rows)
        p = probabilities(row, TARGET)
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

    @pytest.mark.parametrize("row", SETTINGS, ids=str)
    def test_acceptance_is_the_overlap(self, row):
        """A draft stays with probability sum min(p, q); no rule accepts more."""
        for logits in DRAFTERS.values():
            rows = settings(row)
            _, accepted = run(drafts_of(logits, rows), rows)
            p = probabilities(row, TARGET[0])
            q = np.eye(W)[2] if logits is None else probabilities(row, logits[0])
            overlap = np.minimum(p, q).sum()
            assert (accepted >= 1).mean() == pytest.approx(overlap, abs=0.01)

    def test_accepting_always_is_seen(self):
        """The planted bug: the same test tells it from the rule."""
        row = SETTINGS[0]
        rows = settings(row)
        tokens, accepted = run(drafts_of(OTHER, rows), rows, acceptance=1.0)
        assert (accepted == K).all()
        p = probabilities(row, TARGET)
        counts = np.bincount(tokens[:, 0], minlength=W)
        assert chi_square(counts, p[0]) > 10 * bound(W - 1)

    def test_without_drafts_it_is_sampling(self):
        """To the bit, so that a seed means the same with and without the machinery."""
        for row in (*SETTINGS, {"temperature": 0.0}):
            rows = settings(row, 500)
            none = Drafts(jnp.zeros((500, 0), jnp.int32), jnp.zeros(500, jnp.int32), None)
            logits = jnp.tile(TARGET[:1], (500, 1, 1))
            tokens, accepted = jax.jit(verify)(logits, none, rows, jnp.full(500, 9))
            np.testing.assert_array_equal(
                tokens[:, 0], sample(logits[:, 0], rows, jnp.full(500, 9))
            )
            assert not accepted.any()


class TestGreedy:
    BEST = TARGET.argmax(axis=-1)

    @pytest.mark.parametrize("company", [0.0, 1.0], ids=["greedy batch", "mixed batch"])
    def test_accepts_while_equal(self, company):
        wrong = (self.BEST + 1) % W
        offered = np.array(
            [self.BEST[:2], [self.BEST[0], wrong[1]], [wrong[0], self.BEST[1]], wrong[:2]] * 2
        )
        counts = np.array([2, 2, 2, 2, 1, 1, 0, 0])
        rows = Sampling.pack(
            temperature=np.array([0.0] * 7 + [company]),
            top_k=np.zeros(8),
            top_p=np.ones(8),
            min_p=np.zeros(8),
            seed=np.arange(8),
            stop_tokens=np.full((8, 8), -1),
        )
        for logits in (None, jnp.asarray(np.tile(TARGET[:2], (8, 1, 1)))):
            tokens = jnp.asarray(offered)
            if logits is not None:  # greedy drafts are the best of what they are drawn from
                logits = jnp.where(jnp.arange(W) == tokens[..., None], 9.0, logits)
            tokens, accepted = run(Drafts(tokens, jnp.asarray(counts), logits), rows)
            assert accepted[:7].tolist() == [2, 1, 0, 0, 1, 1, 0]
            for b in range(7):
                n = accepted[b] + 1
                assert tokens[b, :n].tolist() == self.BEST[:n].tolist()


class TestSynthetic:
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("rate", [0.0, 0.3, 0.85, 1.0])
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
        tokens, accepted = run(drafts_of(OTHER, rows), rows, acceptance=0.5)
        p = probabilities({}, TARGET)
        for place in range(K + 1):
            own = tokens[accepted == place, place]
            assert chi_square(np.bincount(own, minlength=W), p[place]) < bound(W - 1)
