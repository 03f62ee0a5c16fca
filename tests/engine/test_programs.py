"""The compiled programs have no branch that the shape of a step already decides."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections import Counter
from typing import Any, ClassVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv3_jax.engine.device import buckets as buckets_module
from dsv3_jax.engine.device.buckets import Buckets
from dsv3_jax.engine.device.programs import Programs
from dsv3_jax.engine.device.state import SlotRows, SlotState
from dsv3_jax.engine.device.step import _decode_batch, _Requests
from dsv3_jax.engine.device.step_input import StepOptions, StepShape
from dsv3_jax.generation.completion import RUNNING
from dsv3_jax.generation.drafters import DraftPlan, Drafts
from dsv3_jax.generation.request import Request
from dsv3_jax.generation.sampling import SamplingMode
from dsv3_jax.plan.engine_state import default_buckets
from dsv3_jax.plan.target import Target
from tests.engine.conftest import BUCKETS, MAX_LEN

PAGES, SLOTS = 8, 4
LIKE_GPUS: dict[str, Any] = {"max_steps": 1, "chunk_form": "absorbed"}


@pytest.fixture(scope="module")
def programs(tiny_mtp) -> Programs:
    return Programs(
        tiny_mtp,
        BUCKETS,
        DraftPlan(),
        num_slots=SLOTS,
        max_len=MAX_LEN,
        page_size=64,
        vocab_size=tiny_mtp.config.vocab_size,
    )


@pytest.fixture(scope="module")
def state(programs) -> SlotState:
    return programs.empty_state(PAGES)


def operations(programs: Programs, state: SlotState, shape: StepShape) -> Counter[str]:
    """Numbers of operations in the lowered program, by name."""
    text = programs.lower(*jax.tree.flatten(state), shape).as_text()
    return Counter(re.findall(r"stablehlo\.(\w+)", text))


@pytest.mark.parametrize(("decodes", "chunks"), [(1, 0), (1, 1)])
def test_only_steps_with_filters_sort(programs, state, decodes, chunks):
    greedy, unfiltered, sampled = (
        operations(programs, state, programs.shape(decodes, chunks, StepOptions(mode)))
        for mode in get_args(SamplingMode)
    )
    # The experts of the CPU sort tokens too.
    assert sampled["sort"] == greedy["sort"] + 1
    # A step with a prefill has no program of its own for requests without filters.
    assert unfiltered["sort"] == (sampled if chunks else greedy)["sort"]


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ([{}, {"top_p": 0.9}], "greedy"),
        ([{}, {"temperature": 0.6}], "unfiltered"),
        ([{"temperature": 0.6}, {"top_k": 5}], "unfiltered"),
        ([{"temperature": 0.6}, {"temperature": 0.6, "top_k": 5}], "sampled"),
        ([{"temperature": 0.6, "top_p": 0.9}], "sampled"),
        ([{"temperature": 0.6, "min_p": 0.1}], "sampled"),
    ],
)
def test_the_mode_is_that_of_the_requests(settings, mode):
    requests = [Request((1,), 4, **each) for each in settings]
    assert StepOptions.of(requests).sampling == mode


def test_a_program_is_named_for_its_shape(programs, state):
    text = programs.lower(*jax.tree.flatten(state), programs.shape(1, 0)).as_text()
    name = re.search(r"module @jit_(\w+)", text)
    assert name is not None
    assert name[1].startswith("step_decodes_4_")
    assert name[1].endswith("max_steps_3_sampling_greedy")


@pytest.mark.parametrize("chunks", [0, 1])
def test_sampled_steps_have_no_branch(programs, state, chunks):
    shape = dataclasses.replace(programs.shape(1, chunks, StepOptions("sampled")), **LIKE_GPUS)
    assert operations(programs, state, shape)["case"] == 0


def test_the_absorbed_form_of_chunks_has_no_branch(programs, state):
    expanded = programs.shape(1, 1)
    absorbed = dataclasses.replace(expanded, **LIKE_GPUS)
    # There are two kinds of layers, and each is lowered once.
    assert operations(programs, state, expanded)["case"] == 2
    assert operations(programs, state, absorbed)["case"] == 0


def test_one_step_has_no_loop(programs, state):
    several = programs.shape(1, 0)
    one = dataclasses.replace(several, **LIKE_GPUS)
    several, one = (operations(programs, state, shape)["while"] for shape in (several, one))
    assert several == one + 1


def test_the_loop_over_steps_only_reads_its_condition(programs, state):
    """A GPU's host waits for the condition, so the step before computes it."""
    text = programs.lower(*jax.tree.flatten(state), programs.shape(1, 0)).as_text()
    conditions = re.findall(r"\n *cond \{\n(.*?)\n *\} do \{", text, re.DOTALL)
    only_read = [each for each in conditions if re.fullmatch(r" *stablehlo.return .*", each)]
    assert len(only_read) == 1


def test_padding_has_no_context(state):
    full = dataclasses.replace(
        state,
        lengths=state.lengths + 9,
        finished=state.finished.at[0].set(RUNNING),
    )
    slots = np.array([0, 1, SLOTS], np.int32)  # running, at its end, and none
    shape = BUCKETS.shape(3, 0, max_len=MAX_LEN, max_pages=2)
    tables = np.zeros((3, 2), np.int32)
    rows = SlotRows(None)
    requests = _Requests.of(full, rows, shape, *map(jnp.asarray, (slots, tables)))
    batch = _decode_batch(full, rows, requests, Drafts.empty(3))
    assert batch.sequences.lengths.tolist() == [8, 0, 0]
    assert batch.counts.tolist() == [1, 0, 0]


def test_warm_up_compiles_the_largest_first_and_lowers_at_full_priority(
    programs, state, monkeypatch
):
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, 0)  # on Linux, that of the thread

    before = priority()
    lowered, compiling = [], []
    monkeypatch.setattr(programs, "_lower", lambda state, shape: lowered.append(shape))
    monkeypatch.setattr(programs, "compile", lambda *arguments: compiling.append(priority()))
    monkeypatch.setattr(programs, "_compiled", {})
    monkeypatch.setattr(programs, "_is_warm", False)
    programs.warm_up(state)
    assert sorted(map(repr, lowered)) == sorted(map(repr, programs.shapes))
    sizes = [shape.decodes + shape.chunks * shape.chunk_tokens for shape in lowered]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) > 1
    assert priority() == before
    if sys.platform == "linux":
        assert set(compiling) == {min(before + 10, 19)}


class TestBuckets:
    DEFAULT = Buckets.default(256, platform="gpu", is_hopper=True)
    LIMITS: ClassVar = {"max_len": 5120, "max_pages": 80}

    def test_number_of_programs(self):
        shapes = self.DEFAULT.shapes(**self.LIMITS)
        assert len(shapes) == len(set(shapes)) == 30
        smaller = Buckets.default(64, platform="gpu", is_hopper=True)
        assert len(smaller.shapes(**self.LIMITS)) == 18
        assert len(Buckets.default(16, platform="cpu").shapes(**self.LIMITS)) == 15

    @pytest.mark.parametrize(
        ("decodes", "large"),
        [
            ((8, 16, 32, 64, 128, 256), (64, 256)),
            ((8, 64, 512), (64, 512)),
            ((8, 16), (16,)),  # fewer than a chunk's tokens
            ((64, 100, 256), (64, 256)),
        ],
    )
    def test_sizes_of_steps_that_prefill(self, decodes, large):
        buckets = dataclasses.replace(self.DEFAULT, decodes=decodes)
        assert buckets.large_decodes == large
        assert buckets.shape(9, 1, **self.LIMITS).decodes == large[0]
        assert buckets.shape(9, 0, **self.LIMITS).decodes == decodes[decodes[0] < 9]

    def test_programs_for_gpus_have_no_loop_unless_steps_are_short(self):
        assert {shape.chunk_form for shape in self.DEFAULT.shapes(**self.LIMITS)} == {"absorbed"}
        for decodes, max_steps in ((1, 8), (8, 8), (9, 1), (256, 1)):
            assert self.DEFAULT.shape(decodes, 0, **self.LIMITS).max_steps == max_steps
            assert (decodes <= self.DEFAULT.most_multi_step_decodes) is (max_steps > 1)

    def test_one_request_has_a_program_on_one_hopper_gpu(self, monkeypatch):
        monkeypatch.setattr(buckets_module.target, "platform", lambda: "gpu")
        for capability, decodes in (("9.0", (1, 8, 16)), ("8.0", (8, 16))):
            monkeypatch.setattr(buckets_module.target, "compute_capability", lambda c=capability: c)
            buckets = Buckets.of_devices(16, None)
            assert (buckets.decodes, buckets.most_multi_step_decodes) == (decodes, 8)
            assert buckets.shape(1, 0, **self.LIMITS).decodes == decodes[0]
            assert buckets.shape(1, 1, **self.LIMITS).decodes == 16
            assert Buckets.of_devices(16, None, one_request=False).decodes == (8, 16)
            assert Buckets.of_devices(1, None).decodes == (1,)
        one, two = Target.parse("h100"), Target.parse("h100x2")
        assert default_buckets(one, "single", 16).decodes == (1, 8, 16)
        assert default_buckets(two, "dp_attention_ep", 16).decodes == (8, 16)

    def test_few_requests_in_a_large_program_decode_one_step(self):
        buckets = dataclasses.replace(self.DEFAULT, decodes=(256,))
        assert buckets.most_multi_step_decodes == 0
        assert buckets.shape(3, 0, **self.LIMITS) in buckets.shapes(**self.LIMITS)

    def test_chunks_are_absorbed_where_a_kernel_takes_them(self):
        for is_hopper, token_shards in ((True, 1), (True, 2), (False, 1)):
            buckets = Buckets.default(
                8, platform="gpu", is_hopper=is_hopper, token_shards=token_shards
            )
            absorbs = is_hopper and token_shards == 1
            assert buckets.chunk_form == ("absorbed" if absorbs else "expanded")
        expanded = Buckets.default(8, platform="gpu")
        assert (expanded.chunk_form, expanded.chunk_tokens) == ("expanded", 256)
        h100, a100 = (
            default_buckets(Target.parse(name), "single", 8) for name in ("h100", "a100-80gb")
        )
        assert (h100.chunk_form, a100.chunk_form) == ("absorbed", "expanded")
        shared = default_buckets(Target.parse("h100x8"), "context_parallel", 8)
        assert shared.chunk_form == "expanded"
        assert Buckets.of_devices(8, None) == Buckets.default(8, platform="cpu")

    @given(
        st.integers(0, 256),
        st.integers(0, 32),
        st.integers(1, 8),
        st.sampled_from(get_args(SamplingMode)),
    )
    def test_every_step_has_a_program_that_holds_it(self, decodes, chunks, steps, mode):
        if chunks or decodes > self.DEFAULT.most_multi_step_decodes:
            steps = 1
        elif not decodes:
            return
        shape = self.DEFAULT.shape(decodes, chunks, StepOptions(mode), **self.LIMITS)
        assert shape in self.DEFAULT.shapes(**self.LIMITS)
        assert shape.decodes >= decodes
        assert shape.chunks >= chunks
        assert shape.max_steps >= steps

    def test_padding_is_bounded(self):
        for chunks in range(4, 33):
            assert self.DEFAULT.shape(9, chunks, **self.LIMITS).chunks < 2 * chunks
