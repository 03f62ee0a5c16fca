"""Programs of the Generator and the Engine, compiled for TPUs and GPUs without having them, against
the formula."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv3_jax import presets
from dsv3_jax.checkpoint.find import find_config_directory
from dsv3_jax.config import ModelConfig
from dsv3_jax.layers.moe import MoE
from dsv3_jax.plan import memory, topology
from dsv3_jax.plan.compiled import _kernels, compile_program
from dsv3_jax.plan.deployment import Deployment, EngineSettings
from dsv3_jax.plan.estimate import model_shapes
from dsv3_jax.plan.target import Target

TARGETS = [
    pytest.param(
        target,
        marks=pytest.mark.skipif(
            importlib.util.find_spec(module) is None, reason=f"needs {module}: the extra {extra}"
        ),
    )
    for target, module, extra in (
        ("tpu:v5p:2x2x1", "libtpu", "tpu"),
        ("gpu:h200x4", "jax_cuda13_plugin", "gpu"),
    )
]


@pytest.fixture(autouse=True, scope="module")
def without_compilation_cache():
    """JAX cannot load a cached program for a GPU that is not there, and warns."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def demo(target: str) -> Deployment:
    """Returns a deployment of the demo with a dense layer and an MoE layer."""
    config = ModelConfig.from_hf(find_config_directory("demo"))
    config = dataclasses.replace(config, num_hidden_layers=2)
    return Deployment(config, Target.parse(target), "dp_attention_ep", 4, 256, prefill_chunk=64)


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_arguments_are_the_planners(target, phase):
    """The program's arguments are the weights, also in the form that decode takes, the cache and
    the state."""
    plan = demo(target)
    program = compile_program(plan, phase)
    shard = model_shapes(plan).shard(plan.layout)
    use = (memory.decode if phase == "decode" else memory.prefill)(shard, plan)
    arguments = use.weights + use.up_projections + use.cache + use.state
    assert program.arguments == pytest.approx(arguments, rel=0.01)
    assert program.peak == program.arguments + program.workspace


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_step_of_the_engine_does_not_copy_the_cache(target, phase):
    """The results overwrite the cache, which is many times larger than everything else."""
    plan = demo(target)
    plan = dataclasses.replace(
        plan,
        layout_name="tp_attention_ep",
        mtp=True,
        engine=EngineSettings(
            cache_tokens=2**20,
            chunks=2,
            chunk_form="absorbed" if plan.target.platform == "gpu" else "expanded",
        ),
    )
    program = compile_program(plan, phase)
    shard = model_shapes(plan).shard(plan.layout)
    use = (memory.decode if phase == "decode" else memory.prefill)(shard, plan)
    arguments = use.weights + use.up_projections + use.cache + use.state
    assert program.arguments == pytest.approx(arguments, rel=0.001)
    assert program.reused >= use.cache
    assert program.workspace < use.cache / 20


@pytest.mark.parametrize(
    ("target", "module", "extra"),
    [("tpu:v5p:4x4x8", "libtpu", "tpu"), ("gpu:h200x8", "jax_cuda13_plugin", "gpu")],
)
def test_a_compiler_that_is_not_installed(monkeypatch, target, module, extra):
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"expected {module} .* '\.\[{extra}\]'"):
        topology.topology(Target.parse(target))


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize("target", TARGETS[1:])
def test_the_router_is_not_merged_with_the_shared_expert(target):
    """In float32 at full precision, XLA would multiply by the router's weight and the shared
    expert's first two matrices in one matmul, whose results have had NaN on a GPU."""
    config = dataclasses.replace(
        presets.MOONLIGHT_16B, hidden_size=1024, moe_intermediate_size=512, n_shared_experts=2
    )
    shapes = nnx.eval_shape(
        lambda: MoE(config, rngs=nnx.Rngs(0), dtype=jnp.float32, quantization=None)
    )
    graph, state = nnx.split(shapes)
    mesh = Mesh(np.array(topology.topology(Target.parse(target))[:1]), ("x",))
    place = NamedSharding(mesh, PartitionSpec())
    tokens = jax.ShapeDtypeStruct((4, 1, 1024), jnp.float32)
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), (state, tokens)
    )
    with jax.default_matmul_precision("highest"):
        lowered = jax.jit(lambda state, x: nnx.merge(graph, state)(x)).lower(*arguments)
    text, shared = lowered.compile().as_text(), 2 * 1024
    assert f"f32[{shared},1024]" in text  # the shared expert's two are merged
    assert f"f32[{shared + config.n_routed_experts},1024]" not in text


def test_gpus_without_kernels_are_not_compiled_for():
    with pytest.raises(ValueError, match="expected TPUs or Hopper GPUs, got gpu:b200x8"):
        topology.topology(Target.parse("b200x8"))


def test_kernels_by_name():
    text = """
      %mla_decode.1 = (bf16[2]) custom-call(%a), custom_call_target="tpu_custom_call", b={}
      ROOT %grouped_matmul.12 = f32[2] custom-call(%a), custom_call_target="tpu_custom_call"
      %grouped_matmul = f32[2] custom-call(%a), custom_call_target="tpu_custom_call"
      %mpmd_map.3 = f32[2] custom-call(%a), custom_call_target="mosaic_gpu_v2"
      %topk.3 = f32[2] custom-call(%a), custom_call_target="TopK"
    """
    assert _kernels(text) == {"grouped_matmul": 2, "mla_decode": 1, "mosaic_gpu": 1}
