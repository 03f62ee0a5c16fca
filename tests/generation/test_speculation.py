"""Speculation changes only the speed: whole generations with and without drafters.

The MTP layer of the random model is almost always wrong. The weights of two more models are chosen
so that it is always right, or always wrong. The models differ in their weights only, so that one
Generator serves all three with the same compiled programs.
"""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv3_jax
from dsv3_jax.config import ModelConfig
from dsv3_jax.engine.scheduling.step_sizes import StepTimes
from dsv3_jax.generation import drafters, selection
from dsv3_jax.generation.depth import DepthChooser
from dsv3_jax.generation.drafters import (
    DraftContext,
    DraftPlan,
    Drafts,
    MTPDrafter,
    NgramDrafter,
    SyntheticDrafter,
)
from dsv3_jax.generation.selection import verify
from dsv3_jax.kv_cache import LatentKVCache
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.offline import pace as offline_pace
from dsv3_jax.offline.generator import Generator
from tests.generation.fragments import MAX_LEN, VOCAB_SIZE, letters
from tests.generation.packing import pack_sampling
from tests.generation.test_loop import LOGPROB_TOLERANCE, PROMPTS
from tests.support.checkpoints import random_tensors, tiny_config, write_checkpoint
from tests.support.covering import slow_except
from tests.support.running import forward

SETTINGS = {"max_new_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def config():
    """A model with a dense layer, and an MTP layer with experts."""
    return tiny_config(num_hidden_layers=1, num_nextn_predict_layers=1)


def bigram_tensors(config, sign: float):
    """Returns weights without attention and experts, so that a token depends only on the previous
    one, in the model and in the MTP layer. With `sign` -1 the MTP layer's logits are negated."""
    tensors = random_tensors(config)
    D = config["hidden_size"]
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = np.zeros_like(tensor)
        elif name.endswith("norm.weight"):
            tensors[name] = np.ones_like(tensor)
        elif name.endswith("eh_proj.weight"):
            tensors[name] = np.concatenate([sign * np.eye(D), np.zeros((D, D))], axis=1).astype(
                tensor.dtype
            )
    return tensors


@pytest.fixture(scope="module")
def directories(tmp_path_factory, config):
    """Three checkpoints: random; the MTP layer is always right; it drafts the least probable
    token."""
    tensors_of = {
        "random": random_tensors(config),
        "right": bigram_tensors(config, 1.0),
        "wrong": bigram_tensors(config, -1.0),
    }
    paths = {name: tmp_path_factory.mktemp(name) for name in tensors_of}
    for name, tensors in tensors_of.items():
        write_checkpoint(paths[name], config, tensors)
    return paths


@pytest.fixture(scope="module")
def models(directories) -> dict[str, DeepSeekV3]:
    return {name: dsv3_jax.load(directory)[0] for name, directory in directories.items()}


@pytest.fixture(scope="module")
def plain(models, tokenizer) -> Generator:
    return Generator(models["random"], tokenizer, MAX_LEN, batch_sizes=(4,), prefill_chunk=4)


@pytest.fixture(scope="module")
def without_mtp(directories, tokenizer) -> Generator:
    model, _ = dsv3_jax.load(directories["random"], mtp=False)
    return Generator(model, tokenizer, MAX_LEN, batch_sizes=(4,), prefill_chunk=4)


@pytest.fixture
def right(plain, models) -> Iterator[Generator]:
    plain.use(models["right"])
    yield plain
    plain.use(models["random"])


@pytest.fixture
def wrong(plain, models) -> Iterator[Generator]:
    plain.use(models["wrong"])
    yield plain
    plain.use(models["random"])


@pytest.fixture
def few_depths(monkeypatch):
    """Restricts "auto" to two depths, because each compiles a program."""
    monkeypatch.setattr(drafters, "AUTO_DEPTHS", (0, 2))


def check_same(speculative, plain) -> None:
    """Checks that completions are equal, except for statistics and rounding of logprobs."""
    for got, want in zip(speculative, plain, strict=True):
        assert got.tokens == want.tokens
        assert (got.text, got.finish_reason) == (want.text, want.finish_reason)
        np.testing.assert_allclose(got.logprobs, want.logprobs, rtol=0, atol=LOGPROB_TOLERANCE)
        assert got.speculation is not None
        assert want.speculation is None


@pytest.mark.slow
# This test is first, while nothing is compiled.
@pytest.mark.parametrize(
    ("draft", "depth"), slow_except([("mtp", 2), ("mtp", "auto"), ("ngram", 1)], quick=(0,))
)
@pytest.mark.usefixtures("few_depths")
def test_nothing_compiles_after_the_warm_up(plain, without_mtp, compilations, draft, depth):
    generator = plain if draft == "mtp" else without_mtp
    drafting = {"draft": draft, "draft_depth": depth}
    generator.warm_up(4, **drafting)
    assert compilations
    compilations.clear()
    generator.generate(PROMPTS, max_new_tokens=None, **drafting)
    generator.generate(PROMPTS[:2], temperature=[0.0, 1.0], top_p=0.9, stop="ka", **drafting)
    assert list(generator.stream("what", **drafting))
    assert compilations == []


@dataclasses.dataclass(frozen=True)
class Oracle:
    """Drafts each sequence's true continuation, but a wrong token at every n-th position."""

    truth: tuple[tuple[int, ...], ...]
    wrong_every: tuple[int, ...]
    """n for each sequence."""
    name = "oracle"
    mtp_hidden = None
    acceptance = None

    def draft(self, model, context, sampling, depth, vocab_size):
        positions = context.lengths[:, None] + jnp.arange(depth)
        tokens = jnp.take_along_axis(jnp.array(self.truth), positions, axis=1, mode="clip")
        is_wrong = positions % jnp.array(self.wrong_every)[:, None] == 0
        tokens = jnp.where(is_wrong, (tokens + 1) % VOCAB_SIZE, tokens)
        return Drafts(tokens, jnp.full(tokens.shape[0], depth), None), context.cache


def slow(*values):
    """Marks parameters as slow: each drafter and depth compiles a program for seconds. TestDrafts
    checks which hidden state the MTP layer takes."""
    return pytest.param(*values, marks=pytest.mark.slow)


DEPTHS = [slow(1), 2, slow(4)]
DRAFTERS = [
    slow("mtp", 1),
    ("mtp", 2),
    slow("mtp", 4),
    slow(MTPDrafter("pre_norm"), 2),
    slow(NgramDrafter(3, 1), 4),
    slow("mtp", "auto"),
]


class TestGreedy:
    @pytest.mark.parametrize(("draft", "depth"), DRAFTERS, ids=str)
    def test_equals_no_speculation(self, plain, draft, depth):
        want = plain.generate(PROMPTS, **SETTINGS)
        got = plain.generate(PROMPTS, **SETTINGS, draft=draft, draft_depth=depth)
        check_same(got, want)
        if depth != "auto":
            assert got.stats.drafted > 0

    @pytest.mark.slow
    @pytest.mark.usefixtures("few_depths")
    def test_a_depth_that_changes(self, plain):
        want = plain.generate(PROMPTS, **SETTINGS)
        check_same(plain.generate(PROMPTS, **SETTINGS, draft="mtp", draft_depth="auto"), want)

    @pytest.mark.slow
    def test_prompt_lookup(self, plain, without_mtp):
        """Prompt look-up does not need an MTP layer."""
        want = plain.generate(PROMPTS, **SETTINGS)
        got = without_mtp.generate(PROMPTS, **SETTINGS, draft="ngram", draft_depth=1)
        check_same(got, want)
        assert got.stats.drafted > 0

    @pytest.mark.slow
    def test_any_acceptance_gives_the_same_tokens(self, plain, monkeypatch):
        """A drafter of this test, whose drafts are wrong never, always and at every third position.
        The model attends to cached tokens, so that a wrong length of the cache shows."""
        # The drafter knows a sequence by its row. Rows move up in a dispatch after one has ended.
        monkeypatch.setattr(offline_pace, "DISPATCH_SECONDS", 1e9)
        want = plain.generate(PROMPTS, **SETTINGS)
        sequences = [[*prompt, *c.tokens] for prompt, c in zip(PROMPTS, want, strict=True)]
        truth = tuple((*tokens, *[0] * (MAX_LEN - len(tokens))) for tokens in sequences)
        oracle = Oracle(truth, wrong_every=(MAX_LEN + 9, 3, 1, 3))
        got = plain.generate(PROMPTS, **SETTINGS, draft=oracle, draft_depth=4)
        check_same(got, want)
        steps = [completion.speculation.steps for completion in got]
        # After the first token, which comes from the prefill.
        assert (steps[0], steps[2]) == (5, 23)
        # Two of three tokens are accepted drafts, and the third is the model's own.
        assert all(8 <= steps[b] <= 9 for b in (1, 3))

    @pytest.mark.parametrize("depth", DEPTHS)
    def test_right_drafts(self, right, depth):
        want = right.generate(PROMPTS, **SETTINGS)
        got = right.generate(PROMPTS, **SETTINGS, draft="mtp", draft_depth=depth)
        check_same(got, want)
        assert len({token for c in want for token in c.tokens}) > 10
        assert got.stats.acceptance_rate == 1.0
        # The first of 24 tokens comes from the prefill.
        assert [c.speculation.steps for c in got] == [-(-23 // (depth + 1))] * 4

    @pytest.mark.parametrize("depth", DEPTHS)
    def test_wrong_drafts(self, wrong, depth):
        want = wrong.generate(PROMPTS, **SETTINGS)
        got = wrong.generate(PROMPTS, **SETTINGS, draft="mtp", draft_depth=depth)
        check_same(got, want)
        assert got.stats.acceptance_rate == 0.0
        assert [c.speculation.steps for c in got] == [23] * 4

    def test_settings_of_each_sequence(self, plain):
        """Sequences end at different times, and a sampled one does not affect greedy ones."""
        settings = {
            "max_new_tokens": [1, 2, 24, 9],
            "temperature": [0.0, 0.0, 0.0, 1.3],
            "ignore_eos": True,
        }
        want = plain.generate(PROMPTS, **settings)
        got = plain.generate(PROMPTS, **settings, draft="mtp", draft_depth=2)
        check_same(got[:3], want[:3])
        assert [len(c.tokens) for c in got] == [1, 2, 24, 9]
        assert got[0].speculation.drafted == (0, 0), "no room for a draft"
        assert got[1].speculation.drafted[1] == 0, "room for one draft alone"

    @pytest.mark.parametrize("depth", [2, slow(4)])
    def test_the_end_of_the_cache(self, plain, depth):
        """Drafts and their cache entries never exceed max_len."""
        prompts = [[(3 * i) % 150 for i in range(MAX_LEN - n)] for n in (1, 2, 5, 9)]
        settings = {"max_new_tokens": None, "ignore_eos": True}
        want = plain.generate(prompts, **settings)
        check_same(plain.generate(prompts, **settings, draft="mtp", draft_depth=depth), want)
        assert [len(c.tokens) for c in want] == [1, 2, 5, 9]


@pytest.fixture
def endless(right):
    return right.generate(PROMPTS, **SETTINGS)


class TestEndsInsideAStep:
    """A sequence that ends inside a step's accepted tokens ends as without speculation. The MTP
    layer is always right, so that every draft is accepted."""

    def test_stop_tokens(self, right, endless):
        for position in range(12):
            tokens = [completion.tokens[position] for completion in endless]
            settings = SETTINGS | {"stop_tokens": [[token] for token in tokens]}
            want = right.generate(PROMPTS, **settings)
            got = right.generate(PROMPTS, **settings, draft="mtp", draft_depth=2)
            check_same(got, want)
            for completion, token in zip(got, tokens, strict=True):
                assert completion.tokens[-1] == token
                assert completion.speculation.tokens == len(completion.tokens) - 1

    def test_lengths(self, right, endless):
        for n in range(1, 13):
            settings = SETTINGS | {"max_new_tokens": n}
            got = right.generate(PROMPTS, **settings, draft="mtp", draft_depth=2)
            assert [c.tokens for c in got] == [c.tokens[:n] for c in endless]
            assert {c.finish_reason for c in got} == {"length"}

    def test_stop_strings(self, right, endless):
        for b in range(4):
            text = endless[b].text
            strings = {text[at : at + 3] for at in (1, 4, 7, 11)} - {""}
            for stop in sorted(strings):
                settings = SETTINGS | {"stop": stop}
                want = right.generate(PROMPTS[b], **settings)
                got = right.generate(PROMPTS[b], **settings, draft="mtp", draft_depth=2)
                check_same(got, want)
                assert got[0].finish_reason == "stop"
                stream = right.stream(PROMPTS[b], **settings, draft="mtp", draft_depth=2)
                assert "".join(stream) == want[0].text

    @pytest.mark.slow
    def test_logprobs(self, right):
        settings = SETTINGS | {"logprobs": 5}
        want = right.generate(PROMPTS, **settings)
        got = right.generate(PROMPTS, **settings, draft="mtp", draft_depth=2)
        check_same(got, want)
        for a, b in zip(got, want, strict=True):
            assert len(a.top_logprobs) == len(a.tokens)
            for ours, theirs in zip(a.top_logprobs, b.top_logprobs, strict=True):
                assert [t for t, _ in ours] == [t for t, _ in theirs]
                np.testing.assert_allclose(
                    [p for _, p in ours], [p for _, p in theirs], atol=LOGPROB_TOLERANCE
                )


class TestDrafts:
    """Drafters propose the tokens that they should."""

    @pytest.mark.slow
    @pytest.mark.parametrize("mtp_hidden", ["post_norm", "pre_norm"])
    def test_first_draft_is_what_the_whole_model_predicts(
        self, plain, models, monkeypatch, mtp_hidden
    ):
        """After accepted and rejected drafts the MTP layer's cache is correct: its drafts equal
        those of a whole forward pass over the final tokens."""
        model, seen = models["random"], []

        def spy(logits, drafts, sampling, positions, acceptance):
            """Records drafts, positions and counts of every step of the compiled loop."""
            jax.debug.callback(
                lambda *values: seen.append([np.array(value) for value in values]),
                drafts.tokens,
                positions,
                drafts.counts,
                ordered=True,
            )
            return verify(logits, drafts, sampling, positions, acceptance)

        monkeypatch.setattr(selection, "verify", spy)
        monkeypatch.setattr(plain, "_programs", {})
        # All steps after two in one dispatch, so that the same requests are in all of its rows.
        monkeypatch.setattr(plain, "_step_times", StepTimes())
        monkeypatch.setattr(offline_pace, "DISPATCH_SECONDS", 1e9)
        out = plain.generate(PROMPTS, **SETTINGS, draft=MTPDrafter(mtp_hidden), draft_depth=2)
        sequences = [[*prompt, *c.tokens] for prompt, c in zip(PROMPTS, out, strict=True)]
        padded = np.array([[*seq, *[0] * (MAX_LEN - len(seq))] for seq in sequences])
        _, aux = forward(model, padded, mtp_hidden)  # causal, so padding has no influence
        best = np.asarray(aux.mtp_logits[0])[..., :VOCAB_SIZE].argmax(axis=-1)
        checked = 0
        for b, sequence in enumerate(sequences):
            for drafts, lengths, counts in seen:
                length = lengths[b]
                if counts[b] and length < len(sequence):
                    assert drafts[b, 0] == best[b, length - 2]
                    checked += 1
        assert checked > 60

    def test_prompt_lookup_on_examples(self, models):
        """The drafts follow the latest earlier occurrence of the last four, three or two tokens."""
        sampling = pack_sampling(seed=np.arange(4))
        cache = LatentKVCache.init(models["random"].cache_spec(), 4, MAX_LEN)

        @jax.jit
        def draft(tokens, lengths):
            context = DraftContext(
                tokens=tokens,
                lengths=lengths,
                is_running=jnp.ones(4, bool),
                cache=cache,
                mtp_inputs=jnp.zeros((4, 0, models["random"].config.hidden_size)),
                num_mtp_inputs=jnp.zeros(4, jnp.int32),
            )
            return NgramDrafter().draft(models["random"], context, sampling, 3, VOCAB_SIZE)[0]

        def drafts_for(prompts):
            tokens = np.zeros((4, MAX_LEN), np.int32)
            for b, prompt in enumerate(prompts):
                tokens[b, : len(prompt)] = prompt
            lengths = np.array([len(prompt) for prompt in prompts], np.int32)
            return draft(jnp.array(tokens), jnp.array(lengths))

        a, b, c, d, e = range(10, 15)
        drafts = drafts_for(
            [
                [a, b, c, d, e, a, b],  # a b was followed by c d e
                [a, b, c, a, b, d, a, b],  # the later occurrence is used
                [e, a, b, c, d, a, b, d, e, a, b],  # the longer n-gram is used
                [a, b, a, b, a, b],  # the copy continues with the tokens that it has copied
            ]
        )
        assert drafts.counts.tolist() == [3] * 4
        assert drafts.tokens.tolist() == [[c, d, e], [d, a, b], [c, d, a], [a, b, a]]
        drafts = drafts_for([[a], [a, b], [a, b, c], [a, a]])
        assert drafts.counts.tolist() == [0, 0, 0, 0], "nothing to look up"


class TestSampling:
    @pytest.mark.parametrize(("draft", "depth"), [("mtp", 2), ("ngram", 1)])
    def test_other_sequences_and_their_order_do_not_matter(self, plain, without_mtp, draft, depth):
        generator = plain if draft == "mtp" else without_mtp
        settings = SETTINGS | {
            "temperature": 1.2,
            "top_p": 0.9,
            "draft": draft,
            "draft_depth": depth,
        }
        together = generator.generate(PROMPTS, **settings, seed=[1, 2, 3, 4])
        backwards = generator.generate(PROMPTS[::-1], **settings, seed=[4, 3, 2, 1])
        assert list(together) == list(backwards)[::-1]
        alone = generator.generate(PROMPTS[2], **settings, seed=3)
        assert alone[0] == together[2]

    def test_padding_of_the_vocabulary_is_never_chosen(self, plain):
        settings = SETTINGS | {"temperature": 50.0}
        out = plain.generate(PROMPTS, **settings, draft="mtp", draft_depth=2)
        assert max(max(c.tokens) for c in out) < VOCAB_SIZE


class TestStatistics:
    def test_add_up(self, plain):
        out = plain.generate(PROMPTS, **SETTINGS, temperature=1.0, draft="mtp", draft_depth=2)
        total = out.stats.speculation
        assert total.draft == "mtp"
        for name in ("steps", "tokens"):
            assert getattr(total, name) == sum(getattr(c.speculation, name) for c in out)
        for c in out:
            # The first token comes from the prefill.
            assert c.speculation.tokens == len(c.tokens) - 1
            assert c.speculation.steps == c.speculation.tokens - sum(c.speculation.accepted)
            assert len(c.speculation.acceptance) == 2
        assert out.stats.drafted == sum(total.drafted)
        assert out.stats.accepted == sum(total.accepted)
        assert total.accept_length == total.tokens / total.steps
        assert out.stats.as_json()["speculation"]["accept_length"] == total.accept_length

    @pytest.mark.slow
    def test_synthetic_is_named_in_the_statistics(self, plain):
        """test_verification.py checks the rates."""
        settings = SETTINGS | {"max_new_tokens": 1 + 8 * 3}  # the prefill's token, then whole steps
        out = plain.generate(PROMPTS[1:], **settings, draft="synthetic:1", draft_depth=2)
        assert out.stats.speculation.draft == "synthetic:1"
        assert {c.as_json()["speculation"]["draft"] for c in out} == {"synthetic:1"}
        assert out.stats.speculation.accept_length == 3.0

    def test_a_synthetic_drafter_has_its_rate_in_its_name(self, config):
        drafter = DraftPlan.read("synthetic:0.25", 2, ModelConfig.from_hf(config)).drafter
        assert drafter is not None
        assert (drafter.name, drafter.acceptance) == ("synthetic:0.25", 0.25)


class TestRefusals:
    def test_a_model_without_an_mtp_layer(self, without_mtp):
        for draft in ("mtp", "synthetic:0.5"):
            with pytest.raises(ValueError, match="draft: expected a model with an MTP layer"):
                without_mtp.generate([5, 6], draft=draft)

    def test_rates(self):
        with pytest.raises(ValueError, match="from 0 to 1, got 2"):
            SyntheticDrafter(2.0)


def test_only_mtp_drafts_have_an_mtp_cache(plain):
    pool = plain._programs_of(4, DraftPlan()).empty_state(2).pool
    assert pool.mtp == ()
    pool = plain._programs_of(4, DraftPlan(MTPDrafter(), (1,))).empty_state(2).pool
    assert len(pool.mtp) == 1
    assert jnp.shape(pool.mtp[0]["latent"]) == jnp.shape(pool.layers[0]["latent"])


def test_a_warm_up_measures_costs_and_learns_no_acceptance(right, monkeypatch):
    """Its prompt is made up. The MTP layer of this model is always right."""
    # Other tests share this Generator. The number of steps must not depend on what they measured.
    monkeypatch.setattr(right, "_step_times", StepTimes())
    seen = []
    observe = DepthChooser.observe

    def watched(self, depth, drafted, accepted, steps, seconds):
        seen.append((sum(drafted), sum(accepted), steps, seconds))
        observe(self, depth, drafted, accepted, steps, seconds)

    monkeypatch.setattr(DepthChooser, "observe", watched)
    drafting = {"draft": "mtp", "draft_depth": 2}
    right.warm_up(4, **drafting)
    right.warm_up(4, **drafting)
    assert [s[:2] for s in seen] == [(0, 0)] * 2
    assert seen[-1][2] == 1
    assert seen[-1][3] > 0
    seen.clear()
    right.generate([5, 6] * 8, **drafting, ignore_eos=True)
    assert sum(s[0] for s in seen) > 0


@pytest.mark.slow
def test_every_depth_of_the_program_with_logprobs_is_warm(plain, compilations, monkeypatch):
    """Even if the costs are already known. Two depths, because each has two programs."""
    depths = (0, 2)
    monkeypatch.setattr(drafters, "AUTO_DEPTHS", depths)
    plain.warm_up(4, draft="ngram", draft_depth="auto")
    plain.warm_up(4, draft="ngram", draft_depth="auto", logprobs=1)
    compilations.clear()
    for depth in depths:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DepthChooser, "choose", lambda self, depth=depth: depth)
            plain.generate(PROMPTS, draft="ngram", draft_depth="auto", logprobs=2)
    assert compilations == []


def test_letters_are_a_prompt(plain):
    """Drafting from a text prompt equals drafting from its ids."""
    settings = SETTINGS | {"draft": "mtp", "draft_depth": 2}
    text = plain.generate("what", **settings)
    ids = plain.generate([0, *letters("what")], **settings)
    assert text[0] == ids[0]
