"""After a warm-up nothing compiles for any settings, as JAX's compilation events show."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import dsv3_jax
from dsv3_jax.generation.generator import Generator
from dsv3_jax.generation.program import GPU_OPTIONS
from dsv3_jax.generation.programs import Programs
from dsv3_jax.generation.sampling import Sampling
from sharding import make_layout
from tests.generation.fragments import letters


@pytest.fixture(scope="module")
def fresh(dense, tokenizer) -> Generator:
    """A Generator with shapes that no other test uses, so that none of its programs exist."""
    return Generator(dense, tokenizer, 61, batch_sizes=(3,), prefill_chunk=8)


def test_the_event_is_seen(compilations):
    function = jax.jit(lambda x: x * 3 + 1)
    x = np.arange(17, dtype=np.float32)
    function(x)
    assert len(compilations) == 1
    function(x)
    assert len(compilations) == 1
    jnp.asarray(x) * 5  # an operation outside jit counts as well
    assert len(compilations) > 1


def test_nothing_compiles_after_the_warm_up(fresh, compilations):
    seconds = fresh.warm_up(3)
    assert len(compilations) >= 2  # prefill and decode
    assert seconds > sum(compilations) > 0
    compilations.clear()
    fresh.warm_up()  # one sequence runs in the program of batch size 3
    ask_for_all_sorts_of_things(fresh)
    assert compilations == []

    fresh.warm_up(3, logprobs=1)
    assert len(compilations) >= 1  # the decode program that records top_logprobs
    compilations.clear()
    for n in (1, 5, 20):
        fresh.generate([letters("a"), letters("bcd")], logprobs=n)
    ask_for_all_sorts_of_things(fresh)
    assert compilations == []


def ask_for_all_sorts_of_things(generator: Generator) -> None:
    """Generates with every setting, one for all prompts or one per prompt."""
    a, b, c = letters("one"), [9], letters("a much longer prompt than the others")
    generator.generate([a, b])
    generator.generate([c, c, a], max_new_tokens=[3, None, 1])
    generator.generate([[*c, *c[:20]], b, a], max_new_tokens=None)
    generator.generate(["text", "more text"], temperature=[0.0, 1.3], seed=[4, 2**32 - 1])
    generator.generate([a, b, c], temperature=0.7, top_k=7, top_p=0.9, min_p=0.02, seed=range(3))
    generator.generate([a, b], stop=("a", "<turn>"), stop_tokens=[8, 9], ignore_eos=True)
    generator.generate([a, b], stop="k", temperature=np.float32(2), seed=np.arange(2))
    # Two batches: three and two sequences.
    generator.generate([c, b, a, b, a], max_new_tokens=[1, 2, 3, 4, 5], stop="zz")
    settings = {"max_new_tokens": 25, "temperature": 1.0}
    assert list(generator.stream("abc", **settings))
    assert list(generator.stream(c, stop=("e", "<turn>"), **settings))
    next(generator.stream("closed early", **settings))


def test_strides_share_a_program(fresh, compilations, monkeypatch):
    fresh.warm_up(3)
    compilations.clear()
    for stride in (1, 2, 33):
        monkeypatch.setattr(fresh, "stride", stride)
        list(fresh.stream(letters("abc"), stop="k"))
    assert compilations == []


@pytest.mark.slow
def test_a_checkpoint_with_a_tokenizer(demo, compilations):
    demo.warm_up(2)
    compilations.clear()
    settings = {"max_new_tokens": 20, "temperature": 0.8, "stop": "\n\n"}
    demo.generate(["def f(", "import os"], **settings)
    assert list(demo.stream("class A:\n", **settings))
    assert compilations == []


def test_up_projections_are_cut_before_the_loop(tiny):
    """Each layer's [H, N + V, C] is made before the loop; inside, it would be copied each step."""
    programs = Programs.of(tiny, 64, prefill_chunk=1, vocab_size=160)
    sampling = Sampling.pack(seed=np.zeros(2))
    arguments = programs.decode.leaves, programs.empty_state(2), sampling, np.int32(1), None, 0
    traced = jax.make_jaxpr(programs.decode.function, static_argnums=(4, 5))(*arguments)
    c = tiny.config
    rows = c.qk_nope_head_dim + c.v_head_dim
    whole = (c.num_attention_heads, rows, c.kv_lora_rank)
    inside_loop = [inside for shape, inside in computed_shapes(traced.jaxpr) if shape == whole]
    assert inside_loop == [False] * c.num_hidden_layers


@pytest.mark.parametrize(("backend", "options"), [("gpu", GPU_OPTIONS), ("cpu", {}), ("tpu", {})])
def test_a_gpu_runs_kernels_side_by_side(tiny, monkeypatch, backend, options):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    programs = Programs.of(tiny, 64, prefill_chunk=1, vocab_size=160)
    assert programs.decode.options == programs.prefill.options == options


def computed_shapes(jaxpr, inside=False) -> Iterator[tuple[tuple[int, ...], bool]]:
    """Yields the shape of each computed array, and whether it is computed inside a loop."""
    for equation in jaxpr.eqns:
        yield from ((variable.aval.shape, inside) for variable in equation.outvars)
        looped = inside or equation.primitive.name == "while"
        for inner in jaxprs_in_params(equation.params):
            yield from computed_shapes(inner, looped)


@pytest.mark.parametrize("name", ["single", "dp_attention_ep"])
def test_shapes_of_a_state_are_those_of_a_state(name):
    """Their shardings are equal too, so that programs compiled ahead of time are those that run."""
    layout = None if name == "single" else make_layout(name)
    model, _ = dsv3_jax.load("demo", layout=layout)
    programs = Programs.of(model, 64, prefill_chunk=8, vocab_size=model.config.vocab_size)
    shapes, structure = programs.state_shapes(8, depth=1, mtp=True)
    state = programs.decode.shard(programs.empty_state(8, depth=1, mtp=True))
    assert structure == jax.tree.structure(state)
    for shape, array in zip(shapes, jax.tree.leaves(state), strict=True):
        assert (shape.shape, shape.dtype) == (array.shape, array.dtype)
        if layout is None:
            assert shape.sharding is None
        else:
            assert shape.sharding.is_equivalent_to(array.sharding, array.ndim)
