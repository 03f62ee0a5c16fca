"""The traces are the ones that other engines were measured with."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from dsv3_jax.traces import TRACES, chat, fixed

SHARED = Path(__file__).parents[2] / "shared" / "bench"


@pytest.mark.parametrize(
    ("name", "totals"), [("chat", (768, 456_094, 195_084)), ("prefixed", (512, 849_223, 62_487))]
)
def test_totals(name, totals):
    requests = TRACES[name]().requests
    got = (
        len(requests),
        sum(r.prompt_tokens for r in requests),
        sum(r.output_tokens for r in requests),
    )
    assert got == totals


@pytest.mark.parametrize("name", sorted(TRACES))
def test_a_trace_equals_the_shared_file(name):
    file = SHARED / f"trace_{name}.json"
    if not file.exists():
        pytest.skip("the traces that other engines were measured with are not beside this checkout")
    shared = json.loads(file.read_text())
    trace = TRACES[name]()
    assert (trace.name, trace.seed) == (shared["name"], shared["seed"])
    assert [dataclasses.asdict(r) for r in trace.requests] == shared["requests"]


def test_prompts_share_exactly_their_prefix():
    trace = TRACES["prefixed"]()
    by_family: dict[int, list[int]] = {}
    for i, request in enumerate(trace.requests[:40]):
        by_family.setdefault(request.family, []).append(i)
    first, second = next(members for members in by_family.values() if len(members) > 1)[:2]
    a, b = trace.prompt(first, 1000), trace.prompt(second, 1000)
    assert a[:1536] == b[:1536]
    assert a[1536:1552] != b[1536:1552]


def test_fixed_lengths():
    trace = fixed(5, 3, count=4)
    assert [(r.prompt_tokens, r.output_tokens) for r in trace.requests] == [(5, 3)] * 4
    prompts = {tuple(trace.prompt(i, 1000)) for i in range(4)}
    assert len(prompts) == 4
    assert set(map(len, prompts)) == {5}


def test_prompts_have_ids_between_the_special_ones():
    trace = chat()
    ids = np.concatenate([trace.prompt(i, 40) for i in range(5)])
    assert set(ids) == set(range(10, 30))
    assert len(trace.prompt(3, 40)) == trace.requests[3].prompt_tokens


def test_a_vocabulary_of_special_ids_is_refused():
    with pytest.raises(ValueError, match="more than 20 ids, got 20"):
        chat().prompt(0, 20)
