"""A Generator that is not reproducible: the same tokens, from the steps of an engine."""

import numpy as np
import pytest

import dsv3_jax
from dsv3_jax.engine.scheduling.step_sizes import StepTimes
from dsv3_jax.generation.errors import Interrupted
from dsv3_jax.offline.generator import Generator
from dsv3_jax.offline.pace import OfflinePace
from sharding import make_layout
from tests.engine.conftest import tiny_mtp  # noqa: F401
from tests.generation import test_loop
from tests.generation.fragments import MAX_LEN
from tests.generation.test_interruption import signal_at
from tests.support.checkpoints import random_tensors, tiny_config, write_checkpoint

LENGTHS = (2, 9, 3, 4, 1, 6, 7)
PROMPTS = [test_loop.PROMPTS[i % 4] for i in range(len(LENGTHS))]


@pytest.fixture(scope="module")
def mixed(dense, tokenizer) -> Generator:
    """Two requests at a time, in programs of one or two."""
    return Generator(dense, tokenizer, MAX_LEN, batch_sizes=(2,), reproducible=False)


@pytest.fixture(scope="module")
def apart(dense, tokenizer) -> Generator:
    """Two programs: one that prefills and one that decodes."""
    return Generator(dense, tokenizer, MAX_LEN, batch_sizes=(4,), prefill_chunk=16)


def check_equal(got, expected):
    """Checks completions of programs that round differently."""
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours.tokens, ours.text) == (theirs.tokens, theirs.text)
        assert ours.finish_reason == theirs.finish_reason
        tolerance = test_loop.LOGPROB_TOLERANCE
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=tolerance)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": (0.0, 1.0, 0.7, 1.0, 0.0, 1.0, 0.0), "seed": range(7)},
        pytest.param({"logprobs": 3, "repetition_penalty": 1.3}, marks=pytest.mark.slow),
    ],
)
def test_the_same_completions(mixed, apart, settings):
    settings = settings | {"max_new_tokens": LENGTHS}
    got = mixed.generate(PROMPTS, **settings)
    check_equal(got, apart.generate(PROMPTS, **settings))
    # The last ones decode while others prefill, so that together they take fewer steps.
    assert max(LENGTHS) - 1 <= got.stats.steps < sum(LENGTHS)
    assert got.stats.new_tokens == sum(len(c.tokens) for c in got)


@pytest.mark.slow
def test_steps_prefill_and_decode(mixed, monkeypatch):
    """The first request decodes while the others prefill, one after the other."""
    plans = []
    read = OfflinePace.read
    monkeypatch.setattr(
        OfflinePace, "read", lambda self, plan, *rest: (plans.append(plan), read(self, plan, *rest))
    )
    mixed.generate(PROMPTS[:1] * 4, max_new_tokens=(30, 2, 2, 2), ignore_eos=True)
    assert any(plan.chunks and plan.decodes for plan in plans)


@pytest.mark.slow
def test_a_stream(mixed, apart):
    settings = {"max_new_tokens": 11, "ignore_eos": True}
    pieces = list(mixed.stream(PROMPTS[1], **settings))
    (expected,) = apart.generate(PROMPTS[1], **settings)
    assert "".join(pieces) == expected.text
    assert [token for piece in pieces for token in piece.tokens] == expected.tokens


@pytest.mark.slow
def test_a_warm_up_compiles_all_programs(mixed):
    mixed.warm_up(2)
    (programs,) = mixed._programs.values()
    compiled = len(programs._compiled)
    mixed.generate(PROMPTS, max_new_tokens=LENGTHS)
    assert len(programs._compiled) == compiled


@pytest.mark.slow
def test_an_interrupt_returns_what_there_is(mixed, monkeypatch):
    signal_at(monkeypatch, 3)
    with pytest.raises(Interrupted) as error:
        mixed.generate(PROMPTS, max_new_tokens=LENGTHS, ignore_eos=True)
    tokens = [len(c.tokens) for c in error.value.generation]
    assert 0 < sum(tokens) < sum(LENGTHS)


@pytest.mark.slow
def test_drafts_and_counts_of_experts(tiny_mtp):  # noqa: F811
    def counted(**options):
        generator = Generator(tiny_mtp, None, 64, batch_sizes=(2,), count_routing=True, **options)
        drafted = generator.generate(
            [[3, 1], [4, 1, 5], [9]], max_new_tokens=12, draft="mtp", draft_depth=2
        )
        return drafted, generator.take_routing_counts()

    (got, counts), (expected, _) = counted(reproducible=False), counted()
    assert [c.tokens for c in got] == [c.tokens for c in expected]
    assert sum(got.stats.speculation.drafted) > 0
    K = tiny_mtp.config.num_experts_per_tok
    per_layer = counts.sum(axis=1)
    assert (per_layer % K == 0).all()
    assert (per_layer > 0).all()


@pytest.mark.slow
def test_on_a_mesh(tmp_path, bare):
    config = tiny_config(num_hidden_layers=2, num_nextn_predict_layers=0)
    write_checkpoint(tmp_path, config, random_tensors(config))
    model, _ = dsv3_jax.load(tmp_path, layout=make_layout("dp_attention_ep"))
    sharded = Generator(model, None, MAX_LEN, batch_sizes=(8,), reproducible=False)
    prompts, lengths = 2 * PROMPTS, 2 * LENGTHS
    got = sharded.generate(prompts, max_new_tokens=lengths, ignore_eos=True)
    expected = bare.generate(prompts, max_new_tokens=lengths, ignore_eos=True)
    assert [c.tokens for c in got] == [c.tokens for c in expected]


def test_it_takes_no_prefill_chunk(tiny):
    with pytest.raises(ValueError, match="prefill_chunk: expected None with reproducible=False"):
        Generator(tiny, None, MAX_LEN, prefill_chunk=16, reproducible=False)


def test_the_time_of_a_dispatch_begins_with_the_end_of_the_one_before():
    """Dispatches of 4 steps end at 10, 14 and 18 seconds; the next one is always chosen before."""

    class Chooser:
        is_fixed, depths = True, (0,)

        def __init__(self):
            self.seconds = []

        def choose(self):
            return 0

        def observe(self, depth, drafted, accepted, steps, seconds):
            self.seconds.append(seconds)

    class Plan:
        chunks, decodes, depth = (), (1,), 0

    class Result:
        steps = [type("Step", (), {"drafted": 0, "tokens": [1]})] * 4

    chooser = Chooser()
    pace = OfflinePace(
        chooser,
        StepTimes(),
        "program",
        tokens=None,
        max_over_processes=float,
        overlap=True,
        clock=lambda: 0.0,
    )
    for now in (10.0, 14.0, 18.0):
        pace.choose(8)
        pace.read(Plan(), [Result()], now)
    assert chooser.seconds == [None, 4.0, 4.0]
    assert pace.steps == 12
