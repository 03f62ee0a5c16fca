"""The compiled programs have no branch that the shape of a step already decides."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from dsv3_jax.engine.programs import Programs, empty_pool
from dsv3_jax.engine.state import SlotState
from tests.engine.conftest import BUCKETS, MAX_LEN

PAGES, SLOTS = 8, 4


@pytest.fixture(scope="module")
def programs(tiny_mtp) -> Programs:
    return Programs(
        tiny_mtp,
        BUCKETS,
        num_slots=SLOTS,
        max_len=MAX_LEN,
        page_size=64,
        drafter=None,
        depth=0,
        vocab_size=tiny_mtp.config.vocab_size,
    )


@pytest.fixture(scope="module")
def state(tiny_mtp) -> SlotState:
    pool = empty_pool(tiny_mtp, PAGES, 64, mtp=False)
    return SlotState.empty(pool, SLOTS, MAX_LEN, dtype=tiny_mtp.dtype)


def operations(programs: Programs, state: SlotState, **shape) -> Counter[str]:
    """Numbers of operations in the lowered program, by name."""
    text = programs.lower(state, programs.shape(**shape)).as_text()
    return Counter(re.findall(r"stablehlo\.(\w+)", text))


@pytest.mark.parametrize(("decodes", "chunks"), [(1, 0), (1, 1)])
def test_greedy_steps_do_not_sort(programs, state, decodes, chunks):
    greedy, sampled = (
        operations(programs, state, decodes=decodes, chunks=chunks, sampling=mode)
        for mode in ("greedy", "sampled")
    )
    # The experts of the CPU sort tokens too.
    assert sampled["sort"] == greedy["sort"] + 1


def test_steps_that_decode_have_no_branch(programs, state):
    for sampling in ("greedy", "sampled"):
        assert operations(programs, state, decodes=1, chunks=0, sampling=sampling)["case"] == 0
