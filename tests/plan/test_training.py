"""Plans of training: targets, meshes, and the estimate against the compiler's figures."""

import dataclasses
import importlib.util

import pytest

from dsv3_jax import presets
from dsv3_jax.config import ModelConfig
from dsv3_jax.plan.compiled import compile_step
from dsv3_jax.plan.target import Target
from dsv3_jax.plan.training import TrainingPlan
from dsv3_jax.quantization import BlockQuantization
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.memory import ACCURACY, REMAT
from dsv3_jax.training.settings import RunSettings
from tests.support.checkpoints import tiny_config

RUN = TrainingConfig(steps=1, learning_rate=1.0, final_learning_rate=1.0, warmup_steps=0)
TINY = ModelConfig.from_hf(
    tiny_config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=1024,
    )
)


def plan(
    target: str,
    layout: str,
    batch: int = 8,
    length: int = 64,
    context_devices: int | None = None,
    **changes,
) -> TrainingPlan:
    return TrainingPlan(
        TINY,
        Target.parse(target),
        dataclasses.replace(RUN, **changes),
        RunSettings(batch=batch, length=length),
        layout,
        context_devices=context_devices,
    )


@pytest.mark.slow
def test_a_mesh_stores_one_part_on_each_device():
    alone, together = plan("v5p:1x1x1", "single").memory(), plan("v5p:2x2x1", "train").memory()
    assert together.masters < 0.3 * alone.masters  # vectors are on every device
    assert together.moments < 0.3 * alone.moments
    assert together.peak < 0.6 * alone.peak


@pytest.mark.slow
def test_devices_that_share_a_sequence_have_a_part_of_its_activations():
    one = {"batch": 1, "length": 1024}
    alone = plan("v5p:1x1x1", "single", **one).memory()
    shared = plan("v5p:2x2x1", "train", context_devices=4, **one).memory()
    assert shared.masters < 0.3 * alone.masters
    # Every device has the keys and values of all tokens.
    assert shared.activations < 0.5 * alone.activations


def test_a_layout_must_match_the_devices():
    with pytest.raises(ValueError, match="layout: expected one over 4 devices"):
        plan("v5p:2x2x1", "single")
    with pytest.raises(ValueError, match="batch: expected a multiple of 4 devices"):
        plan("v5p:2x2x1", "train", batch=6)
    with pytest.raises(ValueError, match="context_devices: expected a divisor of 4 devices, got 3"):
        plan("v5p:2x2x1", "train", context_devices=3)


CASES = {
    "plain": {},
    "remat": {"remat": REMAT[-1]},
    "accumulate": {"accumulate": 4},
    "lora": {"lora_rank": 16},
    "lora of float8": {"lora_rank": 16},
    # If all layers were dequantised at once, most of the memory would be dense matrices.
    "lora of float8, few tokens": {"lora_rank": 16, "batch": 8},
    "one sequence": {"batch": 1, "length": 32768},
}


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the extra gpu"
)
@pytest.mark.parametrize("name", CASES)
def test_the_estimate_is_near_the_compiler(name):
    """Three layers of Moonlight-16B on an H200, each a minute or two of compilation."""
    sizes = {"num_hidden_layers": 3, "vocab_size": 8192, "max_position_embeddings": 32768}
    config = dataclasses.replace(presets.get("moonlight-16b"), **sizes)
    if "float8" in name:
        config = dataclasses.replace(config, quantization=BlockQuantization())
    changes = dict(CASES[name])
    settings = RunSettings(batch=changes.pop("batch", 128), length=changes.pop("length", 128))
    training = dataclasses.replace(RUN, **changes)
    case = TrainingPlan(config, Target.parse("h200"), training, settings, "single")
    assert case.memory().peak == pytest.approx(compile_step(case).peak, rel=ACCURACY)
