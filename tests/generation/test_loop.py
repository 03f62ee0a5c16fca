"""Generation with cache, chunks and batches, compared with whole forward passes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv3_jax.engine.device.state import SlotState
from dsv3_jax.engine.device.step import step
from dsv3_jax.engine.device.step_input import StepOptions, StepShape, empty_input
from dsv3_jax.generation.completion import FULL, RUNNING, STOPPED
from dsv3_jax.generation.sampling import sample
from dsv3_jax.generation.settings import MAX_STOP_TOKENS
from dsv3_jax.kv_cache import PagePool
from dsv3_jax.offline import call
from dsv3_jax.offline.generator import Generator
from tests.generation.fragments import MAX_LEN, VOCAB_SIZE, letters
from tests.generation.packing import pack_sampling
from tests.support.covering import slow_except

# One token, a few, more than any chunk here, more than a page of the cache.
PROMPTS = [
    [7],
    letters("what"),
    letters("a prompt of some thirty letters"),
    [(5 * i) % 160 for i in range(70)],
]
STEPS = 14

# For float32 sums of a few hundred terms in another order, three layers and a softmax.
LOGPROB_TOLERANCE = 1e-4


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.fixture(scope="module")
def expected(forward):
    """Greedy generation with a whole forward pass for every token."""
    chosen = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        while len(tokens) < len(prompt) + STEPS:
            tokens.append(int(forward(tokens)[-1].argmax()))
        chosen.append(tokens[len(prompt) :])
    assert len({tuple(tokens) for tokens in chosen}) == len(PROMPTS)
    return chosen


class TestGreedy:
    # Most of the other tests compare `generator`, which has chunks of 4, with whole passes.
    @pytest.mark.parametrize(
        "chunk", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4)), 16]
    )
    def test_equals_repeated_forward_passes(self, tiny, bare, expected, chunk):
        generator = bare  # chunks of 16
        if chunk != 16:
            generator = Generator(tiny, None, MAX_LEN, batch_sizes=(4,), prefill_chunk=chunk)
        out = generator.generate(PROMPTS, max_new_tokens=STEPS, ignore_eos=True)
        assert [c.tokens for c in out] == expected
        assert [c.prompt_tokens for c in out] == [len(p) for p in PROMPTS]
        assert [c.finish_reason for c in out] == ["length"] * len(PROMPTS)

    def test_padding_of_the_embedding_is_never_selected(self, generator, forward):
        """The tokenizer has 152 tokens and the embedding 160 rows."""
        prompt = PROMPTS[1]
        out = generator.generate(prompt, max_new_tokens=60, ignore_eos=True)[0]
        logits = forward([*prompt, *out.tokens])[len(prompt) - 1 : -1]
        assert out.tokens == logits[:, :VOCAB_SIZE].argmax(axis=-1).tolist()
        assert (logits.argmax(axis=-1) >= VOCAB_SIZE).any(), "padding would have been chosen"
        hot = generator.generate(prompt, max_new_tokens=60, temperature=50.0, ignore_eos=True)[0]
        assert max(hot.tokens) < VOCAB_SIZE

    def test_the_longest_prompt_has_room_for_one_token(self, generator, forward):
        prompt = [(7 * i) % 150 for i in range(MAX_LEN - 1)]
        out = generator.generate([prompt, [5]], max_new_tokens=[1, 3], ignore_eos=True)
        assert out[0].tokens == [int(forward(prompt)[-1, :VOCAB_SIZE].argmax())]
        assert out[0].finish_reason == "length"
        assert len(out[1].tokens) == 3


REQUESTS = [
    {"prompt": PROMPTS[0], "temperature": 1.0, "seed": 1},
    {"prompt": PROMPTS[1], "temperature": 0.0, "seed": 2},
    {"prompt": PROMPTS[2], "temperature": 1.5, "seed": 3, "top_k": 12},
    {"prompt": PROMPTS[3], "temperature": 0.8, "seed": 2**32 - 1, "top_p": 0.7},
    {"prompt": PROMPTS[1], "temperature": 2.0, "seed": 5, "min_p": 0.05},
    {"prompt": PROMPTS[1], "temperature": 2.0, "seed": 6, "min_p": 0.05},
    {
        "prompt": PROMPTS[2],
        "temperature": 1.2,
        "seed": 7,
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.02,
        "max_new_tokens": 5,
    },
]
DEFAULTS = {
    "temperature": 0.0,
    "seed": 0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "max_new_tokens": 20,
}


def run(generator, *numbers, **settings):
    """Generates the given ones of REQUESTS in one call."""
    requests = [DEFAULTS | REQUESTS[n] for n in numbers]
    columns = {name: [request[name] for request in requests] for name in DEFAULTS}
    return generator.generate(
        [r["prompt"] for r in requests], ignore_eos=True, **columns, **settings
    )


@pytest.fixture(scope="module")
def alone(generator):
    return [run(generator, n)[0] for n in range(len(REQUESTS))]


class TestBatches:
    @pytest.mark.parametrize(
        "numbers", [(0, 1, 2), (2, 0, 1), (3, 4, 5), (6, 3, 2), (4, 4, 4), (5, 6, 1, 0)]
    )
    def test_other_sequences_and_their_order_do_not_matter(self, generator, alone, numbers):
        for n, got in zip(numbers, run(generator, *numbers), strict=True):
            assert got == alone[n]  # tokens, text, and log-probabilities bit for bit

    def test_all_at_once(self, generator, alone):
        """More prompts than the largest batch size take turns, and keep their order."""
        assert list(run(generator, *range(len(REQUESTS)))) == alone

    @pytest.mark.slow
    def test_smaller_programs(self, ladder, alone):
        """Other batch sizes may round differently, but these tokens do not change."""
        out = run(ladder, *range(len(REQUESTS)))  # two at a time
        for got, expected in zip(out, alone, strict=True):
            assert got.tokens == expected.tokens
            np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=LOGPROB_TOLERANCE)

    def test_twice_the_same(self, generator, alone):
        assert run(generator, 2)[0] == alone[2] == run(generator, 2)[0]

    def test_seeds_and_prompts_matter(self, alone):
        assert len({tuple(c.tokens) for c in alone}) == len(alone)

    def test_one_seed_for_all_prompts(self, generator, alone):
        settings = {"temperature": 1.0, "max_new_tokens": 20, "seed": 1, "ignore_eos": True}
        out = generator.generate([PROMPTS[2], PROMPTS[0], PROMPTS[2]], **settings)
        assert out[1] == alone[0]
        assert out[0] == out[2]


SAMPLED = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True}


class TestSeveralOfOnePrompt:
    def test_equal_prompts_differ_by_default(self, generator):
        out = generator.generate([PROMPTS[1]] * 4, **SAMPLED)
        assert len({tuple(c.tokens) for c in out}) == 4
        assert out[0] == generator.generate(PROMPTS[1], **SAMPLED, seed=0)[0]
        assert out[3] == generator.generate(PROMPTS[1], **SAMPLED, seed=3)[0]
        same = generator.generate([PROMPTS[1]] * 4, **SAMPLED, seed=2)
        assert list(same) == [out[2]] * 4

    def test_n_completions_a_prompt(self, generator):
        """More than a batch; those of the first prompt come first."""
        out = generator.generate(PROMPTS[:2], **SAMPLED, n=3, seed=[5, 9])
        alone = [
            generator.generate(prompt, **SAMPLED, seed=seed + j)[0]
            for prompt, seed in zip(PROMPTS[:2], (5, 9), strict=True)
            for j in range(3)
        ]
        assert list(out) == alone
        greedy = generator.generate(PROMPTS[1], max_new_tokens=4, n=2)
        assert greedy[0] == greedy[1]

    @pytest.mark.slow
    def test_settings_for_each_prompt(self, generator):
        want = generator.generate([PROMPTS[1]] * 2, **SAMPLED, seed=3, logprobs=4)[0]
        stop = want.tokens[5]
        out = generator.generate(
            [PROMPTS[1]] * 2,
            **SAMPLED,
            seed=3,
            stop_tokens=[[], [stop]],
            logprobs=[0, 4],
        )
        assert out[0].tokens == want.tokens
        assert out[0].top_logprobs is None
        assert out[1].tokens == want.tokens[: want.tokens.index(stop) + 1]
        assert out[1].top_logprobs == want.top_logprobs[: len(out[1].tokens)]


class TestSettingsReachTheSampler:
    """Each setting is applied, to the right sequence."""

    @pytest.mark.parametrize("number", range(len(REQUESTS)))
    def test_against_sampling_from_whole_forward_passes(self, generator, forward, number):
        request = DEFAULTS | REQUESTS[number]
        others = [n for n in (0, 3, 6) if n != number][:2]
        out = run(generator, others[0], number, others[1])[1]
        assert len(out.tokens) == request["max_new_tokens"]
        tokens = [*request["prompt"], *out.tokens]
        begin = len(request["prompt"])
        logits = forward(tokens)[begin - 1 : -1]
        logits[:, VOCAB_SIZE:] = -np.inf
        n = len(out.tokens)
        names = ("temperature", "top_k", "top_p", "min_p", "seed")
        settings = {name: np.full(n, request[name]) for name in names}
        sampling = pack_sampling(stop_tokens=np.full((n, 1), -1), **settings)
        sampled, _ = sample(jnp.asarray(logits), sampling, jnp.arange(begin, begin + n))
        assert out.tokens == sampled.tolist()

    @pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
    def test_one_token_left_is_greedy(self, generator, narrow):
        (name, value), *_ = narrow.items()
        wide = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}[name]
        settings = {"max_new_tokens": 20, "ignore_eos": True, "temperature": 3.0}
        greedy = generator.generate(PROMPTS[2], **settings | {"temperature": 0.0})[0]
        out = generator.generate([PROMPTS[2]] * 2, **settings, **{name: [wide, value]})
        assert out[1] == greedy
        assert out[0].tokens != greedy.tokens

    def test_numbers_of_numpy(self, generator):
        settings = {"max_new_tokens": 8, "ignore_eos": True}
        plain = generator.generate(PROMPTS[:2], seed=[3, 4], temperature=0.5, top_k=9, **settings)
        arrays = generator.generate(
            [np.array(PROMPTS[0]), jnp.array(PROMPTS[1])],
            seed=np.arange(3, 5),
            temperature=np.float32(0.5),
            top_k=np.int64(9),
            **settings,
        )
        assert list(arrays) == list(plain)

    def test_a_table_of_prompts(self, generator):
        table = np.array([letters("abc"), letters("xyz")])
        out = generator.generate(table, max_new_tokens=4)
        assert list(out) == list(generator.generate(table.tolist(), max_new_tokens=4))
        assert len(generator.generate(table[0], max_new_tokens=4)) == 1


class TestLogprobs:
    @pytest.mark.parametrize("temperature", [0.0, 1.7])
    @pytest.mark.parametrize("n", slow_except([1, 5, 20], quick=(1,)))
    def test_against_the_whole_forward_pass(self, generator, forward, n, temperature):
        """Log-probabilities do not depend on temperature and filters."""
        settings = {"temperature": temperature, "top_k": 40, "seed": 8, "ignore_eos": True}
        out = generator.generate(PROMPTS, max_new_tokens=12, logprobs=n, **settings)
        for prompt, got in zip(PROMPTS, out, strict=True):
            logits = forward([*prompt, *got.tokens])[len(prompt) - 1 : -1, :VOCAB_SIZE]
            expected = log_softmax(logits)
            chosen = expected[np.arange(12), got.tokens]
            np.testing.assert_allclose(got.logprobs, chosen, rtol=0, atol=LOGPROB_TOLERANCE)
            assert len(got.top_logprobs) == 12
            for position, top in enumerate(got.top_logprobs):
                ids, values = zip(*top, strict=True)
                assert len(set(ids)) == n
                assert list(values) == sorted(values, reverse=True)
                np.testing.assert_allclose(
                    values, np.sort(expected[position])[::-1][:n], rtol=0, atol=LOGPROB_TOLERANCE
                )
                np.testing.assert_allclose(
                    values, expected[position, list(ids)], rtol=0, atol=LOGPROB_TOLERANCE
                )
                assert ids[0] == expected[position].argmax()
                if got.tokens[position] in ids:
                    assert dict(top)[got.tokens[position]] == got.logprobs[position]

    def test_asking_changes_nothing_else(self, generator):
        settings = {"max_new_tokens": 12, "temperature": 1.0, "seed": 4, "ignore_eos": True}
        without = generator.generate(PROMPTS, **settings)
        for a, b in zip(without, generator.generate(PROMPTS, logprobs=3, **settings), strict=True):
            assert a.top_logprobs is None
            assert (a.tokens, a.text) == (b.tokens, b.text)
            np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=LOGPROB_TOLERANCE)


class TestFinishedSequences:
    S, PAGES = 40, 5  # pages of each sequence, of 8 tokens
    LENGTHS = (9, 5, 1, 3)
    FINISHED = (STOPPED, FULL, RUNNING, RUNNING)

    def state(self, model) -> SlotState:
        rng = np.random.default_rng(0)
        B = len(self.LENGTHS)
        pool = PagePool.empty(model.cache_spec(), B * self.PAGES, page_size=8)
        pool = jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape, np.float32)), pool)
        state = SlotState.empty(pool, B, self.S, mtp_inputs=(0, 0), dtype=jnp.float32)
        return dataclasses.replace(
            state,
            tokens=jnp.asarray(rng.integers(0, 160, (B, self.S)), jnp.int32),
            lengths=jnp.array(self.LENGTHS),
            limits=jnp.array([30, 5, 30, 6]),
            finished=jnp.array(self.FINISHED),
            sampling=pack_sampling(
                seed=np.zeros(B), temperature=1.0, stop_tokens=np.full((B, MAX_STOP_TOKENS), -1)
            ),
        )

    def test_never_change(self, dense):
        graph, weights = nnx.split(dense.precompute_for_decode())
        shape = StepShape(
            decodes=4,
            chunks=0,
            chunk_tokens=0,
            max_pages=self.PAGES,
            max_len=self.S,
            max_steps=100,
            options=StepOptions(sampling=None),
        )

        @jax.jit
        def decode(weights, state, buffer):
            model = nnx.merge(graph, weights)
            return step(model, state, buffer, shape=shape, drafter=None, vocab_size=160)

        def run(state, steps):
            buffer, (inputs,) = empty_input(shape, 4)
            inputs.steps[0] = steps
            inputs.decode_slots[:] = range(4)
            inputs.decode_tables[:] = np.arange(4 * self.PAGES).reshape(4, self.PAGES)
            state, output = decode(weights, state, buffer)
            return state, np.asarray(output.counts).sum(axis=0).tolist()

        before = self.state(dense)
        after, counts = run(before, 7)
        assert counts == [0, 0, 7, 3]
        assert after.lengths.tolist() == [9, 5, 8, 6]
        assert after.finished.tolist() == [STOPPED, FULL, RUNNING, FULL]
        self.check_unchanged(before, after, sequences=(0, 1))
        # Sequence 3 is full too; only sequence 2 continues.
        later, counts = run(after, 100)
        assert counts == [0, 0, 22, 0]
        assert later.lengths.tolist() == [9, 5, 30, 6]
        self.check_unchanged(after, later, sequences=(0, 1, 3))
        last, counts = run(later, 100)
        assert counts == [0] * 4, "no sequence is running, so no step may run"
        self.check_unchanged(later, last, sequences=range(4))

    def check_unchanged(self, before: SlotState, after: SlotState, sequences) -> None:
        rows = list(sequences)
        for old, new in zip(*(jax.tree.leaves(s.slots) for s in (before, after)), strict=True):
            np.testing.assert_array_equal(np.asarray(new)[rows], np.asarray(old)[rows])
        pages = np.arange(4 * self.PAGES).reshape(4, self.PAGES)[rows].ravel()
        for old, new in zip(*(jax.tree.leaves(s.pool) for s in (before, after)), strict=True):
            np.testing.assert_array_equal(np.asarray(new)[pages], np.asarray(old)[pages])


class TestRefill:
    """More prompts than slots."""

    LENGTHS = (2, 30, 3, 4, 5, 6, 7, 8)

    def test_a_slot_is_used_again_as_soon_as_it_is_free(self, generator, monkeypatch):
        """The long completion runs at the same time as all the short ones."""
        monkeypatch.setattr(call, "REFILL_STEPS", 1)
        prompts = [PROMPTS[i % 3] for i in range(len(self.LENGTHS))]
        out = generator.generate(prompts, max_new_tokens=self.LENGTHS, ignore_eos=True)
        assert [len(c.tokens) for c in out] == list(self.LENGTHS)
        assert out.stats.steps == max(self.LENGTHS) - 1

    def test_nothing_else_changes(self, generator):
        """Tokens and log-probabilities, bit for bit."""
        settings = {"temperature": 1.0, "ignore_eos": True}
        prompts = [PROMPTS[i % 3] for i in range(len(self.LENGTHS))]
        seeds = range(len(self.LENGTHS))
        together = generator.generate(prompts, max_new_tokens=self.LENGTHS, seed=seeds, **settings)
        for prompt, length, seed, got in zip(prompts, self.LENGTHS, seeds, together, strict=True):
            alone = generator.generate(prompt, max_new_tokens=length, seed=seed, **settings)
            assert got == alone[0]
