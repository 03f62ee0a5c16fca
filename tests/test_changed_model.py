"""Models with modules that replace the model's own: docs/change_the_model.md shows how."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv3_jax import Generator
from dsv3_jax.checkpoint.writer import write_checkpoint
from dsv3_jax.config import ModelConfig
from dsv3_jax.initialization import random_model
from dsv3_jax.kv_cache import LatentKVCache, TokenBatch
from dsv3_jax.layers import run_layer
from dsv3_jax.layers.linear import Linear
from dsv3_jax.layers.logical_axes import parameter_shardings
from dsv3_jax.layers.paged_cache import CachedArray, append_batches, join_tokens
from dsv3_jax.overrides import few_tokens
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.trainer import Trainer
from sharding import DEFAULT_RULES, make_mesh
from tests.support.checkpoints import tiny_config
from tests.support.oracle import relative_error
from tests.support.running import extend

CONFIG = ModelConfig.from_hf(tiny_config(num_hidden_layers=2))
D = CONFIG.hidden_size
TOKENS = jnp.asarray(np.random.default_rng(0).integers(1, 160, (2, 9)))


class Map(nnx.Module):
    """Takes one argument, as a module does that knows nothing of this model."""

    def __init__(self, inputs: int, outputs: int, seed: int = 1):
        self.kernel = nnx.Param(jax.random.normal(jax.random.key(seed), (inputs, outputs)) * 0.1)

    def __call__(self, x):
        return jnp.tanh(x) @ self.kernel[...]


class Skipped(nnx.Module):
    def __call__(self, x):
        return jnp.zeros_like(x)


class LowRank(Linear):
    """A Linear whose call does more than its weight."""

    def __call__(self, x, out_dtype=None):
        return super().__call__(x, out_dtype) + 1


class Averaging(nnx.Module):
    """An attention that weighs all visible tokens alike."""

    def __init__(self):
        self.kernel = nnx.Param(jax.random.normal(jax.random.key(7), (D, D)) * 0.1)

    def __call__(self, x, rotation):
        values = x @ self.kernel[...]
        return jnp.cumsum(values, axis=1) / (1 + jnp.arange(x.shape[1]))[:, None], values

    def extend_batches(self, x, rotation, caches, forms):
        batches = append_batches({"values": x @ self.kernel[...]}, caches, None)
        means = []
        for cache in (batch.cache for batch in batches):
            B, T = cache.valid.shape
            values = cache.pages["values"][cache.block_tables].reshape(B, -1, D)
            seen = cache.starts[:, None] + 1 + jnp.arange(T)
            weights = (jnp.arange(values.shape[1]) < seen[..., None]) / seen[..., None]
            means.append(weights @ values)
        return join_tokens(means), batches[0].cache.pages

    def cache_spec(self, dtype):
        return {"values": CachedArray(D, dtype)}

    def precompute_for_decode(self, dtype):
        pass


def model() -> Any:
    return random_model(CONFIG, 0)


def low_rank(model: Any) -> None:
    mlp = model.layers[0].mlp
    width = mlp.gate_proj.weight.shape[0]
    mlp.gate_proj = LowRank(D, width, std=0.02, rngs=nnx.Rngs(3), dtype=jnp.float32)


def replace_mlp(model: Any) -> None:
    model.layers[0].mlp = Map(D, D)


def replace_moe(model: Any) -> None:
    model.layers[1].mlp = Map(D, D)


def skip_mlp(model: Any) -> None:
    model.layers[0].mlp = Skipped()


def replace_norms(model: Any) -> None:
    model.layers[0].input_layernorm = Map(D, D, 2)
    model.layers[0].post_attention_layernorm = Map(D, D, 3)
    model.norm = Map(D, D, 4)


def replace_projections(model: Any) -> None:
    mlp = model.layers[0].mlp
    width = mlp.gate_proj.weight.shape[0]
    mlp.gate_proj, mlp.up_proj = Map(D, width, 2), Map(D, width, 3)
    mlp.down_proj = Map(width, D, 4)
    model.layers[1].mlp.shared_experts.down_proj = Map(48, D, 5)
    model.layers[1].self_attn.o_proj = Map(4 * 12, D, 6)


def replace_head(model: Any) -> None:
    model.lm_head = Map(D, CONFIG.vocab_size)


def replace_attention(model: Any) -> None:
    model.layers[0].self_attn = Averaging()


CHANGES = [
    *(replace_mlp, replace_moe, skip_mlp, replace_norms, replace_projections, replace_attention),
    *(replace_head, low_rank),
]


QUICK = replace_mlp, replace_attention, low_rank
SLOW = [pytest.param(change, marks=pytest.mark.slow) for change in CHANGES if change not in QUICK]


@pytest.mark.parametrize("change", [*QUICK, *SLOW])
def test_a_replaced_module_is_called(change):
    """With a cache and without."""
    changed = model()
    before = changed(TOKENS)
    change(changed)
    logits = changed(TOKENS)
    assert relative_error(logits, before) > 1e-3
    cache = LatentKVCache.init(changed.cache_spec(), 2, 16)
    prefilled, cache = extend(changed, TOKENS[:, :5], np.full(2, 5), cache, "expanded")
    assert relative_error(prefilled, logits[:, :5]) < 1e-5
    decoded, _ = extend(changed, TOKENS[:, 5:], np.full(2, 4), cache, "absorbed")
    assert relative_error(decoded, logits[:, 5:]) < 1e-5


def test_a_replaced_attention_runs_prompts_and_decoding_sequences_together():
    changed = model()
    replace_attention(changed)
    want = changed(TOKENS)
    cache = LatentKVCache.init(changed.cache_spec(), 2, 16)
    _, cache = extend(changed, TOKENS[1:, :5].repeat(2, 0), np.array([0, 5]), cache, "expanded")
    first = jax.tree.map(lambda x: x[:1], cache.sequences)
    second = jax.tree.map(lambda x: x[1:], cache.sequences)
    batches = [
        TokenBatch(TOKENS[:1, :7], jnp.array([7]), first, "expanded"),
        TokenBatch(TOKENS[1:, 5:6], jnp.array([1]), second, "absorbed"),
    ]
    hidden, _, _ = changed.extend_batches(batches, cache.pool)
    prompt, decoded = (changed.logits(each.post_norm) for each in hidden)
    assert relative_error(prompt, want[:1, :7]) < 1e-5
    assert relative_error(decoded, want[1:, 5:6]) < 1e-5


def test_a_replaced_linear_map_is_its_own_function():
    """The fused form of the MLP would read the weight and never call the map."""
    changed = model()
    low_rank(changed)
    mlp, x = changed.layers[0].mlp, jax.random.normal(jax.random.key(0), (3, D))
    gate, up = x @ mlp.gate_proj.weight[...].T + 1, x @ mlp.up_proj.weight[...].T
    want = (jax.nn.silu(gate) * up) @ mlp.down_proj.weight[...].T
    assert relative_error(mlp(x), want) < 1e-5


def test_the_kernels_of_a_layer_refuse_what_they_would_not_call(monkeypatch):
    monkeypatch.setattr(few_tokens, "require_hopper", lambda: None)
    for change in (change for change in CHANGES if change is not replace_head):
        changed = model()
        change(changed)
        layer = changed.layers[int(change is replace_moe)]
        assert few_tokens.choose(layer, None, 1) is None
        assert few_tokens.choose(layer, ("mosaic_gpu", "separate"), 1) is None
        with pytest.raises(
            NotImplementedError, match="takes layers of the model's own modules, got"
        ):
            few_tokens.choose(layer, "mosaic_gpu", 1)
    assert few_tokens.choose(model().layers[0], None, 1) is not None


def test_attributes_without_a_hash():
    """Layers with lists run with a cache. They are of one kind only if the lists are equal."""
    changed = model()
    for number, layer in enumerate(changed.layers):
        layer.mlp = Map(D, D)
        layer.mlp.widths = [D, number]
    first, second = (run_layer.split(layer)[0] for layer in changed.layers)
    assert first != second
    assert first == run_layer.split(nnx.clone(changed.layers[0]))[0]
    cache = LatentKVCache.init(changed.cache_spec(), 2, 16)
    counts = jnp.full(2, TOKENS.shape[1])
    hidden = jax.eval_shape(lambda: changed.extend(TOKENS, counts, cache, "expanded")[0].post_norm)
    assert hidden.shape == (*TOKENS.shape, D)


def test_a_generator_describes_itself():
    generator = Generator(model(), None, max_len=16, batch_sizes=(1, 4))
    assert repr(generator) == (
        "Generator(deepseek_v3 model of 2 layers in float32, None, max_len=16, batch_sizes=(1, 4))"
    )


@pytest.mark.slow
def test_a_changed_model_generates_and_trains():
    changed = model()
    replace_mlp(changed)
    generated = Generator(changed, None, max_len=16, batch_sizes=(1,)).generate(
        [[1, 2, 3]], max_new_tokens=5
    )
    tokens = [1, 2, 3, *generated[0].tokens]
    logits = changed(jnp.asarray([tokens]))
    assert [int(t) for t in jnp.argmax(logits[0, 2:-1], axis=-1)] == tokens[3:]
    config = TrainingConfig(steps=2, learning_rate=0.01, final_learning_rate=0.01, warmup_steps=0)
    trainer = Trainer(changed, config)
    state, first = trainer.step(trainer.init(), TOKENS)
    trained: Any = trainer.model(state)
    assert np.all(
        np.asarray(trained.layers[0].mlp.kernel[...] != changed.layers[0].mlp.kernel[...])
    )
    _, second = trainer.step(state, TOKENS)
    assert float(second.losses.main) < float(first.losses.main)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (replace_mlp, "model.layers.0.mlp.down_proj.weight"),
        (skip_mlp, "model.layers.0.mlp.down_proj.weight"),
        (replace_head, "lm_head.kernel"),
    ],
)
def test_a_changed_model_is_not_written_as_a_published_one(change, name, tmp_path):
    changed = model()
    change(changed)
    with pytest.raises(ValueError, match=f"^{name}: expected the published tensors") as error:
        write_checkpoint(changed, tmp_path / "new")
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_replaced_module_on_a_mesh_is_one_line():
    changed = model()
    replace_mlp(changed)
    expected = (
        r"layers\.0\.mlp\.kernel\S*: expected a parameter of the model's own modules on a mesh"
    )
    with pytest.raises(ValueError, match=expected):
        parameter_shardings(changed, make_mesh(data=2, devices=jax.devices()[:2]), DEFAULT_RULES)
