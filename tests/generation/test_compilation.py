"""After a warm-up nothing compiles for any settings, as JAX's compilation events show."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import dsv3_jax
from dsv3_jax.engine.device.programs import GPU_OPTIONS, Programs
from dsv3_jax.engine.device.step_input import empty_input
from dsv3_jax.generation.drafters import DraftPlan, MTPDrafter
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.offline.generator import Generator
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
    assert seconds > max(compilations) > 0  # some compile at the same time
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
    # More than three.
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


def programs_of(model: DeepSeekV3) -> Programs:
    """Returns a Generator's programs for two requests."""
    return Generator(model, None, 64, batch_sizes=(2,))._programs_of(2, DraftPlan())


def test_up_projections_are_not_cut_in_the_loop(tiny):
    """Each layer's [H, N + V, C] is an argument of the program, in the form that it needs."""
    programs = programs_of(tiny)
    leaves, structure = jax.tree.flatten(programs.empty_state(2))
    shape = programs.shape(2, 0)
    buffer, _ = empty_input(shape, 2)
    program = programs._program(shape, structure)
    traced = jax.make_jaxpr(program)(programs.leaves, leaves, buffer)
    c = tiny.config
    rows = c.qk_nope_head_dim + c.v_head_dim
    whole = (c.num_attention_heads, rows, c.kv_lora_rank)
    computed = [*computed_shapes(traced.jaxpr)]
    assert any(inside for _, inside in computed), "it has no loop"
    assert not any(shape == whole for shape, _ in computed)


@pytest.mark.parametrize(("backend", "options"), [("gpu", GPU_OPTIONS), ("cpu", {}), ("tpu", {})])
def test_a_gpu_runs_kernels_side_by_side(tiny, monkeypatch, backend, options):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    programs = programs_of(tiny)

    class Lowered:
        def compile(self, compiler_options=None):
            return compiler_options or {}

    assert programs.compile(Lowered(), programs.shape(2, 0)) == options


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
    generator = Generator(model, None, 64, batch_sizes=(8,))
    programs = generator._programs_of(8, DraftPlan(MTPDrafter(), (1,)))
    shapes, structure = programs.state_shapes(16)
    state = programs.empty_state(16)
    assert structure == jax.tree.structure(state)
    for shape, array in zip(shapes, jax.tree.leaves(state), strict=True):
        assert (shape.shape, shape.dtype) == (array.shape, array.dtype)
        if layout is None:
            assert shape.sharding is None
        else:
            assert shape.sharding.is_equivalent_to(array.sharding, array.ndim)
