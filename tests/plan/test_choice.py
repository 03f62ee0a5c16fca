"""The layout that the planner chooses, and its proposals where nothing fits."""

import dataclasses

import pytest

from dsv3_jax import presets
from dsv3_jax.plan import capacity
from dsv3_jax.plan.choice import OPEN_SETTINGS, choose
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.estimate import DoesNotFitError, estimate
from dsv3_jax.plan.target import Target
from dsv3_jax.plan.weights import ShardCache

FEW_LAYERS = dataclasses.replace(presets.DEEPSEEK_V3, num_hidden_layers=5)


@pytest.fixture(scope="module")
def shards():
    return ShardCache()


def deployment(**changes):
    settings = {
        "config": FEW_LAYERS, "target": Target.parse("h100x16"), "batch": 128, "context": 4096,
        "layout_name": "dp_attention_ep", "quantization": "fp8",
    }  # fmt: skip
    return Deployment(**(settings | changes))


def test_the_fastest_layout_is_chosen(shards):
    choice = choose(deployment(), OPEN_SETTINGS, shards)
    chosen, *rest = choice.layouts
    assert chosen.deployment == choice.deployment
    assert all(chosen.seconds <= each.seconds for each in rest if each.fits)
    names = [each.deployment.layout_name for each in choice.layouts]
    assert sorted(names) == [
        *("context_parallel", "dp_attention_ep", "tensor_parallel", "tp_attention_ep", "tpu_pod"),
    ]
    assert choice.reason.startswith(f"{names[0]} with --")
    assert ": the fastest of 5 layouts that fit" in choice.reason
    assert "\n" not in choice.reason
    # The estimate of the chosen deployment agrees.
    assert estimate(choice.deployment, shards).rooflines["decode"].seconds == chosen.step_seconds


def test_given_settings_are_not_changed(shards):
    given = deployment(exchange="all_to_all", prefill_chunk=256)
    choice = choose(given, {"layout_name"}, shards)
    for each in choice.layouts:
        assert dataclasses.replace(each.deployment, layout_name=given.layout_name) == given
    assert "--" not in choice.reason


def test_a_chunk_becomes_smaller_only_where_it_has_to(shards):
    large = deployment(batch=4096, prefill_chunk=4096, activations="float8")
    candidates = choose(large, {"layout_name", "prefill_chunk"}, shards).layouts
    chunks = {each.deployment.layout_name: each.deployment.prefill_chunk for each in candidates}
    assert 16 <= chunks["dp_attention_ep"] < 4096
    for each in (each for each in candidates if each.deployment.prefill_chunk < 4096):
        doubled = each.deployment.prefill_chunk * 2
        twice = dataclasses.replace(each.deployment, prefill_chunk=doubled)
        assert not capacity.fits(shards.of(twice), twice)


def test_one_device_and_published_units():
    moonlight = dataclasses.replace(presets.MOONLIGHT_16B, num_hidden_layers=3)
    single = deployment(config=moonlight, target=Target.parse("h200"), quantization="bf16", batch=3)
    choice = choose(single, OPEN_SETTINGS, ShardCache())
    assert choice.reason == "single, the only layout that runs on gpu:h200x1"
    unit = deployment(target=Target.parse("h800x144"), batch=144)
    chosen = choose(unit, OPEN_SETTINGS, ShardCache()).deployment
    assert (chosen.layout_name, chosen.redundant_experts) == ("deepseek_decode_ep144", 32)


def test_layouts_for_training_are_not_planned():
    with pytest.raises(ValueError, match="layout: expected one for serving, got train"):
        deployment(layout_name="train", quantization="bf16")


def test_no_layout_runs(shards):
    with pytest.raises(ValueError, match="expected one that runs on gpu:h100x3: dp_attention_ep: "):
        choose(deployment(target=Target.parse("h100x3"), batch=3), OPEN_SETTINGS, shards)


@pytest.mark.slow
def test_nothing_fits_and_the_closest_is_reported(shards):
    """The cache is too large, and largest in layouts where every device has all of it."""
    with pytest.raises(DoesNotFitError) as refused:
        choose(deployment(target=Target.parse("h100x2"), batch=8192), OPEN_SETTINGS, shards)
    error = refused.value
    assert error.deployment.layout_name in ("dp_attention_ep", "context_parallel")
    assert error.largest_part == ("latent cache", error.memory["decode"].cache)
    assert error.missing == max(each.peak for each in error.memory.values()) - (
        error.deployment.target.chip.memory
    )
    assert "GB too much in" in str(error)
    assert "whose largest part is latent cache" in str(error)
    for proposal in error.remedies:
        assert estimate(applied(error.deployment, proposal), shards)


@pytest.mark.slow
def test_combinations_are_proposed(shards):
    """Dequantized weights and a long chunk are each too large: only both changes keep the batch.
    The planner used to propose only a smaller batch."""
    plan = deployment(target=Target.parse("h100x2"), batch=4000)
    with pytest.raises(DoesNotFitError) as refused:
        estimate(plan, shards)
    assert "--prefill-chunk 16 --activations float8" in refused.value.remedies
    assert "--batch 258" in refused.value.remedies
    for proposal in refused.value.remedies:
        assert estimate(applied(plan, proposal), shards)


@pytest.mark.slow  # makes the shapes of the whole model
def test_16_h100s_fit_deepseek_v3_with_float8_activations():
    """With bfloat16 activations prefill dequantizes every float8 matrix, and the copies do not fit.
    The planner used to propose only a prefill chunk of one token."""
    plan, shards = deployment(config=presets.DEEPSEEK_V3), ShardCache()
    with pytest.raises(DoesNotFitError) as refused:
        estimate(plan, shards)
    assert "--activations float8" in refused.value.remedies
    assert "--prefill-chunk 1" not in refused.value.remedies
    assert estimate(dataclasses.replace(plan, activations="float8"), shards).largest_batch == 160
    assert choose(plan, OPEN_SETTINGS, shards).deployment.activations == "float8"
    with pytest.raises(DoesNotFitError) as refused:
        estimate(dataclasses.replace(plan, quantization="bf16"), shards)
    assert "--quantization fp8 --activations float8" in refused.value.remedies


def applied(plan: Deployment, proposal: str) -> Deployment:
    """The deployment that the flags of ``proposal`` ask for when they are added to ``plan``'s."""
    words = proposal.split()
    changes: dict = {}
    while words:
        flag = words.pop(0)
        if flag == "without":
            changes[words.pop(0).removeprefix("--")] = None
            continue
        name = flag.removeprefix("--").replace("-", "_").replace("layout", "layout_name")
        if name == "float8_dispatch":
            changes[name] = True
            continue
        value = words.pop(0)
        changes[name] = int(value) if value.isdecimal() else value
        if name == "target":
            changes[name] = Target.parse(value)
    return dataclasses.replace(plan, **changes)
