"""Speculation with the demo checkpoint on held-out code: equal tokens, and the acceptance rate.

Prompts are the beginnings of modules of this interpreter's standard library that the demo was not
trained on (by the rule of scripts/train_demo.py; the text may differ by a version).
"""

import sysconfig
from pathlib import Path
from typing import Any

import pytest

import dsv3_jax
from dsv3_jax.generation.completion import Generation
from dsv3_jax.offline.generator import Generator
from dsv3_jax.training.corpus import is_held_out
from scripts.train_demo import modules
from tests.support.running import optimized

pytestmark = pytest.mark.slow

PROMPTS, LENGTH, NEW = 200, 48, 32
# Measured with these prompts (Python 3.11.7): greedy 0.777 and 0.516 on 2026-11-21; at temperature
# 1 0.668 and 0.355 on 2026-11-26, since the first token comes from the prefill. Before, the same
# seeds gave 0.684 and 0.376; means over three sets of seeds are 0.668 and 0.370 before, and 0.665
# and 0.363 now, with standard errors of 0.005. With the same tokens, a loss of 0.02 is a fault.
MIN_ACCEPTANCE = {0.0: (0.757, 0.496), 1.0: (0.648, 0.335)}


@pytest.fixture(scope="module")
def generators() -> dict[int, Generator]:
    model, tokenizer = dsv3_jax.load("demo")
    sizes = (1, 16)
    return {
        size: optimized(Generator(model, tokenizer, 128, batch_sizes=(size,))) for size in sizes
    }


@pytest.fixture(scope="module")
def prompts(generators) -> list[list[int]]:
    """Pieces from the middle of long modules, because beginnings are similar."""
    tokenizer = generators[1].tokenizer
    pieces = []
    for name, text in modules(Path(sysconfig.get_paths()["stdlib"])):
        if is_held_out(name) and len(text) > 2000:
            middle = text[len(text) // 2 :]
            for at in (0, 1000, 2000, 4000):
                pieces.append(tokenizer.encode(middle[at:])[:LENGTH])
    pieces = [piece for piece in pieces if len(piece) == LENGTH]
    assert len(pieces) >= PROMPTS
    return pieces[:: len(pieces) // PROMPTS][:PROMPTS]


def generate(generator: Generator, prompts: list[list[int]], **settings) -> Generation:
    return generator.generate(prompts, max_new_tokens=NEW, ignore_eos=True, **settings)


@pytest.fixture(scope="module")
def plain(generators, prompts) -> dict[int, list[list[int]]]:
    return {
        size: [c.tokens for c in generate(g, shared(prompts, size))]
        for size, g in generators.items()
    }


def shared(prompts: list[Any], batch: int) -> list[Any]:
    """Returns every second prompt, and every tenth for batch size 1, which takes much longer."""
    return prompts[:: 10 if batch == 1 else 2]


@pytest.fixture(scope="module")
def greedy(generators, prompts) -> Generation:
    """Returns completions of all prompts with two drafts per step."""
    return generate(generators[16], prompts, draft="mtp", draft_depth=2)


def test_greedy_with_two_drafts_equals_no_speculation(prompts, plain, greedy):
    assert len(prompts) == PROMPTS
    assert [c.tokens for c in shared(list(greedy), 16)] == plain[16]


@pytest.mark.parametrize(("batch", "depth"), [(1, 3), (16, 4)])
def test_greedy_equals_no_speculation(generators, prompts, plain, batch, depth):
    some = shared(prompts, batch)
    out = generate(generators[batch], some, draft="mtp", draft_depth=depth)
    assert [c.tokens for c in out] == plain[batch]
    assert out.stats.acceptance_rate > 0.4


@pytest.mark.parametrize("temperature", MIN_ACCEPTANCE)
def test_acceptance_on_held_out_code(generators, prompts, greedy, temperature):
    out = greedy
    if temperature:
        settings = {"temperature": temperature, "seed": range(PROMPTS)}
        out = generate(generators[16], prompts, draft="mtp", draft_depth=2, **settings)
    drafts = out.stats.speculation
    print(f"acceptance {drafts.acceptance}, accept length {drafts.accept_length:.3f}")
    for got, minimum in zip(drafts.acceptance, MIN_ACCEPTANCE[temperature], strict=True):
        assert got > minimum
