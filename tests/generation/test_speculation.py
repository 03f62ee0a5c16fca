"""Speculation changes the speed and nothing else: whole generations with and without drafters.

The tiny model is random, so its MTP layer is nearly always wrong; two more have their weights
arranged so that it is always right, and always as wrong as can be.
"""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import dsv3_jax
from dsv3_jax.generation import plan
from dsv3_jax.generation.depth import DepthChooser
from dsv3_jax.generation.drafters import Drafts, MTPDrafter, NgramDrafter, SyntheticDrafter
from dsv3_jax.generation.generator import Generator
from dsv3_jax.generation.verification import verify
from dsv3_jax.model import DeepSeekV3
from tests.generation.fragments import MAX_LEN, VOCAB_SIZE, letters
from tests.generation.test_loop import LOGPROB_TOLERANCE, PROMPTS
from tests.support.checkpoints import random_tensors, tiny_config, write_checkpoint
from tests.support.running import forward

SETTINGS = {"max_new_tokens": 24, "ignore_eos": True}


def load(directory, tensors, config) -> DeepSeekV3:
    write_checkpoint(directory, config, tensors)
    return dsv3_jax.load(directory)[0]


@pytest.fixture(scope="module")
def config():
    return tiny_config(num_hidden_layers=2, num_nextn_predict_layers=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory, config) -> DeepSeekV3:
    return load(tmp_path_factory.mktemp("random"), random_tensors(config), config)


@pytest.fixture(scope="module")
def plain(model, tokenizer) -> Generator:
    return Generator(model, tokenizer, MAX_LEN, batch_sizes=(4,), prefill_chunk=4)


def bigram_tensors(config, sign: float):
    """Without attention and experts a token follows from the one before it alone, for the MTP
    layer as for the model; with `sign` -1 the MTP layer has everything upside down."""
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
def right(tmp_path_factory, config, tokenizer) -> Generator:
    """The MTP layer is always right."""
    model = load(tmp_path_factory.mktemp("right"), bigram_tensors(config, 1.0), config)
    return Generator(model, tokenizer, MAX_LEN, batch_sizes=(4,), prefill_chunk=4)


@pytest.fixture(scope="module")
def wrong(tmp_path_factory, config, tokenizer) -> Generator:
    """The MTP layer drafts the least probable token."""
    model = load(tmp_path_factory.mktemp("wrong"), bigram_tensors(config, -1.0), config)
    return Generator(model, tokenizer, MAX_LEN, batch_sizes=(4,), prefill_chunk=4)


def check_same(speculative, plain) -> None:
    """The same but for the statistics; log-probabilities within rounding."""
    for got, want in zip(speculative, plain, strict=True):
        assert got.tokens == want.tokens
        assert (got.text, got.finish_reason) == (want.text, want.finish_reason)
        np.testing.assert_allclose(got.logprobs, want.logprobs, rtol=0, atol=LOGPROB_TOLERANCE)
        assert got.speculation is not None
        assert want.speculation is None


@dataclasses.dataclass(frozen=True)
class Oracle:
    """Knows what the rows of a batch will say, and lies at every so many positions."""

    truth: tuple[tuple[int, ...], ...]
    lies_every: int
    name = "oracle"
    mtp_hidden = None
    acceptance = None

    def draft(self, model, state, sampling, depth, vocab_size):
        places = state.lengths[:, None] + jnp.arange(depth)
        tokens = jnp.take_along_axis(jnp.array(self.truth), places, axis=1, mode="clip")
        if self.lies_every:
            tokens = jnp.where(places % self.lies_every == 0, (tokens + 1) % VOCAB_SIZE, tokens)
        return Drafts(tokens, jnp.full(tokens.shape[0], depth), None), state


def slow(*values):
    """Each drafter and depth is a program, and on two cores half a minute of compilation. Depth 2
    lies between two others; which hidden state is fed shows in the drafts (TestDrafts)."""
    return pytest.param(*values, marks=pytest.mark.slow)


DEPTHS = [1, slow(2), 3, 4]
DRAFTERS = [
    ("mtp", 1),
    slow("mtp", 2),
    slow("mtp", 3),
    ("mtp", 4),
    slow(MTPDrafter("pre_norm"), 2),
    ("ngram", 1),
    slow(NgramDrafter(3, 1), 4),
    ("mtp", "auto"),
]


class TestGreedy:
    @pytest.mark.parametrize(("draft", "depth"), DRAFTERS, ids=str)
    def test_equals_no_speculation(self, plain, draft, depth):
        want = plain.generate(PROMPTS, **SETTINGS)
        got = plain.generate(PROMPTS, **SETTINGS, draft=draft, draft_depth=depth)
        check_same(got, want)
        if depth != "auto":
            assert got.stats.drafted > 0

    @pytest.mark.parametrize("lies_every", [0, 3, 1], ids=["never", "every third", "always"])
    def test_whatever_is_accepted(self, plain, lies_every):
        """With attention over what is cached, so that a wrong length shows; and a drafter that is
        nobody's but this test's."""
        want = plain.generate(PROMPTS, **SETTINGS)
        rows = [[*prompt, *c.tokens] for prompt, c in zip(PROMPTS, want, strict=True)]
        truth = tuple((*row, *[0] * (MAX_LEN - len(row))) for row in rows)
        got = plain.generate(PROMPTS, **SETTINGS, draft=Oracle(truth, lies_every), draft_depth=4)
        check_same(got, want)
        steps = [c.speculation.steps for c in got]
        if lies_every == 3:
            # Two drafts hold between two lies, and the lie's place is the model's own.
            assert all(8 <= step <= 9 for step in steps)
        else:
            assert steps == [24 if lies_every else 5] * 4

    @pytest.mark.parametrize("depth", DEPTHS)
    def test_right_drafts(self, right, depth):
        want = right.generate(PROMPTS, **SETTINGS)
        got = right.generate(PROMPTS, **SETTINGS, draft="mtp", draft_depth=depth)
        check_same(got, want)
        assert len({token for c in want for token in c.tokens}) > 10
        assert got.stats.acceptance_rate == 1.0
        for completion, prompt in zip(got, PROMPTS, strict=True):
            # A prompt of one token has nothing to draft from in its first step.
            blind = len(prompt) == 1
            assert completion.speculation.steps == -(-(24 - blind) // (depth + 1)) + blind

    @pytest.mark.parametrize("depth", DEPTHS)
    def test_wrong_drafts(self, wrong, depth):
        want = wrong.generate(PROMPTS, **SETTINGS)
        got = wrong.generate(PROMPTS, **SETTINGS, draft="mtp", draft_depth=depth)
        check_same(got, want)
        assert got.stats.acceptance_rate == 0.0
        assert [c.speculation.steps for c in got] == [24] * 4

    def test_rows_with_settings_of_their_own(self, plain):
        """Rows finish at different times, and a greedy row does not mind drawn ones beside it."""
        settings = {
            "max_new_tokens": [1, 2, 24, 9],
            "temperature": [0.0, 0.0, 0.0, 1.3],
            "ignore_eos": True,
        }
        want = plain.generate(PROMPTS, **settings)
        got = plain.generate(PROMPTS, **settings, draft="mtp", draft_depth=3)
        check_same(got[:3], want[:3])
        assert [len(c.tokens) for c in got] == [1, 2, 24, 9]
        assert got[0].speculation.drafted == (0, 0, 0), "no room for a draft"
        assert got[1].speculation.drafted[1:] == (0, 0), "room for one draft alone"

    def test_the_end_of_the_cache(self, plain):
        """Drafts never reach past max_len, and neither do what they leave in the caches."""
        prompts = [[(3 * i) % 150 for i in range(MAX_LEN - n)] for n in (1, 2, 5, 9)]
        settings = {"max_new_tokens": 50, "ignore_eos": True}
        want = plain.generate(prompts, **settings)
        for depth in (1, 4):
            check_same(plain.generate(prompts, **settings, draft="mtp", draft_depth=depth), want)
        assert [len(c.tokens) for c in want] == [1, 2, 5, 9]


@pytest.fixture(scope="module")
def endless(right):
    return right.generate(PROMPTS, **SETTINGS)


class TestEndsInsideABlock:
    """Everything that ends a row inside an accepted block ends it as without speculation. The
    model is always right, so that every block is accepted whole."""

    def test_stop_tokens(self, right, endless):
        for row, place in itertools.product(range(4), range(12)):
            token = endless[row].tokens[place]
            settings = SETTINGS | {"stop_tokens": [token]}
            want = right.generate(PROMPTS[row], **settings)
            got = right.generate(PROMPTS[row], **settings, draft="mtp", draft_depth=4)
            check_same(got, want)
            assert got[0].tokens[-1] == token
            assert got[0].speculation.tokens == len(got[0].tokens)

    def test_lengths(self, right, endless):
        for n in range(1, 13):
            settings = SETTINGS | {"max_new_tokens": n}
            got = right.generate(PROMPTS, **settings, draft="mtp", draft_depth=4)
            assert [c.tokens for c in got] == [c.tokens[:n] for c in endless]
            assert {c.finish_reason for c in got} == {"length"}

    def test_stop_strings(self, right, endless):
        for row in range(4):
            text = endless[row].text
            strings = {text[at : at + 3] for at in (1, 4, 7, 11)} - {""}
            for stop in sorted(strings):
                settings = SETTINGS | {"stop": stop}
                want = right.generate(PROMPTS[row], **settings)
                got = right.generate(PROMPTS[row], **settings, draft="mtp", draft_depth=4)
                check_same(got, want)
                assert got[0].finish_reason == "stop"
                stream = right.stream(PROMPTS[row], **settings, draft="mtp", draft_depth=4)
                assert "".join(stream) == want[0].text

    @pytest.mark.slow
    def test_logprobs(self, right):
        settings = SETTINGS | {"logprobs": 5}
        want = right.generate(PROMPTS, **settings)
        got = right.generate(PROMPTS, **settings, draft="mtp", draft_depth=4)
        check_same(got, want)
        for a, b in zip(got, want, strict=True):
            assert len(a.top_logprobs) == len(a.tokens)
            for ours, theirs in zip(a.top_logprobs, b.top_logprobs, strict=True):
                assert [t for t, _ in ours] == [t for t, _ in theirs]
                np.testing.assert_allclose(
                    [p for _, p in ours], [p for _, p in theirs], atol=LOGPROB_TOLERANCE
                )


class TestDrafts:
    """The drafters draft what they say."""

    @pytest.fixture
    def offered(self, monkeypatch):
        """Every step's drafts and the lengths they stand behind, from inside the compiled loop."""
        import jax

        from dsv3_jax.generation import loop

        seen = []

        def spy(logits, drafts, sampling, positions, acceptance):
            jax.debug.callback(
                lambda t, p, c: seen.append((np.array(t), np.array(p), np.array(c))),
                drafts.tokens,
                positions,
                drafts.counts,
                ordered=True,
            )
            return verify(logits, drafts, sampling, positions, acceptance)

        monkeypatch.setattr(loop, "verify", spy)
        return seen

    @pytest.mark.parametrize(("mtp_hidden", "chunk"), [("post_norm", 3), slow("pre_norm", 16)])
    def test_first_draft_is_what_the_whole_model_predicts(self, model, offered, mtp_hidden, chunk):
        """The MTP layer's cache is in step: drafts are those of a whole pass over true tokens,
        after refusals and acceptances alike."""
        generator = Generator(model, None, MAX_LEN, batch_sizes=(4,), prefill_chunk=chunk)
        out = generator.generate(PROMPTS, **SETTINGS, draft=MTPDrafter(mtp_hidden), draft_depth=2)
        checked = 0
        for b, prompt in enumerate(PROMPTS):
            tokens = [*prompt, *out[b].tokens]
            _, aux = forward(model, [tokens], mtp_hidden)
            best = np.asarray(aux.mtp_logits[0][0]).argmax(axis=-1)
            for drafts, lengths, counts in offered:
                length = lengths[b]
                if counts[b] and length < len(tokens):
                    assert drafts[b, 0] == best[length - 2]
                    checked += 1
        assert checked > 60

    def test_prompt_lookup_by_hand(self, model, offered):
        """Of a row's last four, three or two tokens, the latest earlier place and what followed."""
        generator = Generator(model, None, MAX_LEN, batch_sizes=(4,), prefill_chunk=16)
        settings = {"max_new_tokens": 5, "draft": NgramDrafter(), "draft_depth": 3}
        a, b, c, d, e = range(10, 15)
        prompts = [
            [a, b, c, d, e, a, b],  # a b was followed by c d e
            [a, b, c, a, b, d, a, b],  # the later one counts
            [e, a, b, c, d, a, b, d, e, a, b],  # the longer one counts
            [a, b, a, b, a, b],  # the copy goes on with what it copied
        ]
        generator.generate(prompts, **settings)
        drafts, lengths, counts = offered[0]
        assert lengths.tolist() == [7, 8, 11, 6]
        assert counts.tolist() == [3] * 4
        assert drafts.tolist() == [[c, d, e], [d, a, b], [c, d, a], [a, b, a]]

        offered.clear()
        generator.generate([[a], [a, b], [a, b, c], [a, a]], **settings)
        assert offered[0][2].tolist() == [0, 0, 0, 0], "nothing to look up"


class TestSampling:
    @pytest.mark.parametrize(("draft", "depth"), [("mtp", 3), ("ngram", 1)])
    def test_company_and_order_change_nothing(self, plain, draft, depth):
        settings = SETTINGS | {
            "temperature": 1.2,
            "top_p": 0.9,
            "draft": draft,
            "draft_depth": depth,
        }
        together = plain.generate(PROMPTS, **settings, seed=[1, 2, 3, 4])
        backwards = plain.generate(PROMPTS[::-1], **settings, seed=[4, 3, 2, 1])
        assert list(together) == list(backwards)[::-1]
        alone = plain.generate(PROMPTS[2], **settings, seed=3)
        assert alone[0] == together[2]

    def test_padding_of_the_vocabulary_is_never_chosen(self, plain):
        settings = SETTINGS | {"temperature": 50.0}
        out = plain.generate(PROMPTS, **settings, draft="mtp", draft_depth=4)
        assert max(max(c.tokens) for c in out) < VOCAB_SIZE


class TestStatistics:
    def test_add_up(self, plain):
        out = plain.generate(PROMPTS, **SETTINGS, temperature=1.0, draft="mtp", draft_depth=3)
        total = out.stats.speculation
        assert total.draft == "mtp"
        for name in ("steps", "tokens"):
            assert getattr(total, name) == sum(getattr(c.speculation, name) for c in out)
        for c in out:
            assert c.speculation.tokens == len(c.tokens)
            assert c.speculation.steps == len(c.tokens) - sum(c.speculation.accepted)
            assert len(c.speculation.acceptance) == 3
        assert out.stats.drafted == sum(total.drafted)
        assert out.stats.accepted == sum(total.accepted)
        assert total.accept_length == total.tokens / total.steps
        assert out.stats.as_json()["speculation"]["accept_length"] == total.accept_length

    def test_synthetic_says_so(self, plain):
        """test_verification.py has the rates."""
        out = plain.generate(PROMPTS[1:], **SETTINGS, draft="synthetic:1", draft_depth=2)
        assert out.stats.speculation.draft == "synthetic:1"
        assert {c.as_json()["speculation"]["draft"] for c in out} == {"synthetic:1"}
        assert out.stats.speculation.accept_length == 3.0


class TestRefusals:
    def test_a_model_without_an_mtp_layer(self, bare):
        for draft in ("mtp", "synthetic:0.5"):
            with pytest.raises(ValueError, match="draft: expected a model with an MTP layer"):
                bare.generate([5, 6], draft=draft)
        assert bare.generate([5, 6, 5, 6, 5], draft="ngram")[0].speculation is not None

    def test_rates(self):
        with pytest.raises(ValueError, match="from 0 to 1, got 2"):
            SyntheticDrafter(2.0)


def test_nothing_is_drafted_in_a_cache_that_does_not_speculate(plain):
    """Without a drafter no MTP cache is held."""
    cache = plain._programs.empty_state(2).cache
    assert cache.mtp_pages == ()
    cache = plain._programs.empty_state(2, depth=1, mtp=True).cache
    assert len(cache.mtp_pages) == 1
    assert jnp.shape(cache.mtp_pages[0]) == jnp.shape(cache.pages[0])


@pytest.mark.parametrize(("draft", "depth"), [("mtp", 3), ("mtp", "auto"), ("ngram", 1)])
def test_nothing_compiles_after_the_warm_up(plain, compilations, draft, depth):
    drafting = {"draft": draft, "draft_depth": depth}
    plain.warm_up(4, **drafting)
    compilations.clear()
    plain.generate(PROMPTS, max_new_tokens=60, **drafting)
    plain.generate(PROMPTS[:2], temperature=[0.0, 1.0], top_p=0.9, stop="ka", **drafting)
    assert list(plain.stream("what", **drafting))
    assert compilations == []


@pytest.mark.slow
def test_every_depth_of_the_program_with_logprobs_is_warm(plain, compilations, monkeypatch):
    """Also where the costs are known already. Two depths, for each is two programs."""
    depths = (0, 2)
    monkeypatch.setattr(plan, "AUTO_DEPTHS", depths)
    plain.warm_up(4, draft="ngram", draft_depth="auto")
    plain.warm_up(4, draft="ngram", draft_depth="auto", logprobs=1)
    compilations.clear()
    for depth in depths:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DepthChooser, "choose", lambda self, depth=depth: depth)
            plain.generate(PROMPTS, draft="ngram", draft_depth="auto", logprobs=2)
    assert compilations == []


def test_letters_are_a_prompt(plain):
    """Text prompts draft as well."""
    text = plain.generate("what", **SETTINGS, draft="mtp")
    ids = plain.generate([0, *letters("what")], **SETTINGS, draft="mtp")
    assert text[0] == ids[0]
