"""Parameters, cache bytes and operations, compared with values computed independently."""

import dataclasses

import pytest

from dsv3_jax import presets
from dsv3_jax.accounting import (
    active_parameters,
    cache_bytes_per_token,
    checkpoint_bytes,
    count_parameters,
    flops_per_token,
)

V3, V3_2 = presets.DEEPSEEK_V3, presets.DEEPSEEK_V3_2
KI = 1024

# GLM-5 has the components of V3.2 in other sizes. The model does not implement its model_type.
GLM_5 = dataclasses.replace(
    V3_2,
    vocab_size=154880,
    hidden_size=6144,
    num_hidden_layers=78,
    intermediate_size=12288,
    n_group=1,
    topk_group=1,
    num_attention_heads=64,
    q_lora_rank=2048,
    qk_nope_head_dim=192,
    v_head_dim=256,
    index_n_heads=32,
)

# ---- parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("component", "elements"),
    [
        ("embed_tokens", 926_679_040),
        ("attention", 61 * 187_107_328),
        ("layer_norms", 61 * 14_336),
        ("dense_mlp", 3 * 396_361_728),
        ("router", 58 * 1_835_264),
        ("shared_experts", 58 * 44_040_192),
        ("routed_experts", 58 * 11_274_289_152),
        ("final_norm_and_head", 926_686_208),
        ("indexer", 0),
        ("mtp", 11_610_068_224),
        ("mtp_copies", 1_853_358_080),
        ("main", 671_026_419_200),
        ("checkpoint", 684_489_845_504),
    ],
)
def test_components_of_v3(component, elements):
    assert getattr(count_parameters(V3), component) == elements


def test_indexer_of_v3_2_is_in_every_layer_and_in_the_mtp_layer():
    count, without = count_parameters(V3_2), count_parameters(V3)
    assert count.indexer == 61 * 13_959_424
    assert count.mtp - without.mtp == 13_959_424
    assert count.checkpoint - without.checkpoint == 62 * 13_959_424


@pytest.mark.parametrize(
    ("config", "main", "active"),
    [
        (V3, 671.026, 37.552),
        (V3_2, 671.878, 38.40),
        (presets.KIMI_K2, 1026.408, 32.86),
        (presets.DEEPSEEK_V2, 235.741, 21.38),
        (presets.DEEPSEEK_V2_LITE, 15.706, 2.66),
        (presets.MOONLIGHT_16B, 15.960, 2.91),
        (GLM_5, 743.9, 41.8),
    ],
    ids=["v3", "v3.2", "kimi-k2", "v2", "v2-lite", "moonlight", "glm-5"],
)
def test_totals_in_billions(config, main, active):
    digits = len(f"{active}".partition(".")[2])
    assert round(count_parameters(config).main / 1e9, 3 if main != 743.9 else 1) == main
    assert round(active_parameters(config).total / 1e9, digits) == active


def test_every_parameter_of_v2_lite():
    # Total of the headers of the published files.
    assert count_parameters(presets.DEEPSEEK_V2_LITE).checkpoint == 15_706_484_224


def test_active_parameters_of_v3():
    active = active_parameters(V3)
    assert active.total == 37_552_297_472
    # Without the embedding table, two norms and two latent norms per layer, a norm and 58 biases.
    norms = 61 * (2 * 7168 + 1536 + 512) + 7168 + 58 * 256
    assert active.matmul == 37_552_297_472 - 926_679_040 - norms
    assert round(active.matmul / 1e9, 3) == 36.625
    assert round(active.mtp / 1e9, 3) == 0.688


def test_all_parameters_are_active_if_a_token_uses_every_expert():
    dense = dataclasses.replace(V3, n_routed_experts=8, n_group=1, topk_group=1)
    assert active_parameters(dense).total == count_parameters(dense).main
    assert active_parameters(dense).mtp == count_parameters(dense).mtp


def test_indexer_matrices_count_as_matmul_and_its_norm_does_not():
    more = active_parameters(V3_2).matmul - active_parameters(V3).matmul
    assert more == 61 * (13_959_424 - 2 * 128)


def test_without_mtp_layers_nothing_is_added():
    count = count_parameters(presets.KIMI_K2)
    assert (count.mtp, count.mtp_copies) == (0, 0)
    assert active_parameters(presets.KIMI_K2).mtp == 0


def test_every_mtp_layer_counts():
    two = count_parameters(dataclasses.replace(V3, num_nextn_predict_layers=2))
    assert two.main == count_parameters(V3).main
    assert two.mtp == 2 * 11_610_068_224
    assert two.mtp_copies == 2 * 1_853_358_080
    assert active_parameters(dataclasses.replace(V3, num_nextn_predict_layers=2)).mtp == 688_100_608


# ---- bytes ---------------------------------------------------------------------------------------


def test_checkpoint_of_v3():
    assert checkpoint_bytes(V3) == 688_574_839_360
    # Copies take 2 bytes per element.
    assert checkpoint_bytes(V3, mtp_copies=False) == 688_574_839_360 - 2 * 1_853_358_080
    assert round(checkpoint_bytes(V3, mtp_copies=False) / 1e9, 1) == 684.9


def test_checkpoint_of_v3_in_bfloat16():
    plain = dataclasses.replace(V3, quantization=None)
    # Two bytes per element, and two more for the 59 selection biases.
    assert checkpoint_bytes(plain) == 2 * 684_489_845_504 + 2 * 59 * 256
    assert round(checkpoint_bytes(plain, mtp_copies=False) / 1e12, 3) == 1.365


def test_checkpoint_in_float32_has_four_bytes_per_element():
    float32 = dataclasses.replace(V3, quantization=None, dtype="float32")
    assert checkpoint_bytes(float32) == 4 * 684_489_845_504


def test_checkpoint_of_v3_2():
    # Size of the published files: 642.12 GiB.
    assert round(checkpoint_bytes(V3_2) / 2**30, 2) == 642.12
    # The indexer adds fp8 with scales, bfloat16 head weights and a float32 LayerNorm to 62 layers;
    # norms grow by 2 bytes per element.
    indexer = 8192 * 1536 + 64 * 12 * 4 + 128 * 7168 + 56 * 4 + 2 * 64 * 7168 + 4 * 256
    norms = 62 * (2 * 7168 + 1536 + 512) + 7168 + 3 * 7168
    assert checkpoint_bytes(V3_2) - checkpoint_bytes(V3) == 62 * indexer + 2 * norms


@pytest.mark.parametrize(
    ("config", "gigabytes"), [(presets.DEEPSEEK_V2_LITE, 31.4), (presets.MOONLIGHT_16B, 31.9)]
)
def test_checkpoints_that_fit_one_gpu(config, gigabytes):
    assert round(checkpoint_bytes(config) / 1e9, 1) == gigabytes


# ---- cache ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "dtype", "mtp", "expected"),
    [
        (V3, "bfloat16", False, 61 * 1152),
        (V3, "bfloat16", False, 70_272),
        (V3, "bfloat16", True, 71_424),
        (V3, "fp8", False, 61 * 656),
        (V3, "fp8", False, 40_016),
        (V3, "fp8", True, 62 * 656),
        (V3_2, "fp8", False, 48_068),
        (V3_2, "fp8", True, 62 * 788),
        (V3_2, "bfloat16", False, 70_272 + 61 * 256),
        (presets.KIMI_K2, "bfloat16", False, 70_272),
        (presets.KIMI_K2, "bfloat16", True, 70_272),
        (presets.DEEPSEEK_V2_LITE, "bfloat16", False, 31_104),
        (GLM_5, "bfloat16", False, 89_856 + 78 * 256),
        (GLM_5, "fp8", False, 78 * 656 + 10_296),
    ],
)
def test_cache_bytes(config, dtype, mtp, expected):
    assert cache_bytes_per_token(config, dtype, mtp=mtp) == expected


@pytest.mark.parametrize(
    ("config", "dtype", "gibibytes"),
    [(V3, "bfloat16", 8.58), (V3, "fp8", 4.88), (V3_2, "fp8", 5.87)],
)
def test_cache_of_128k_tokens(config, dtype, gibibytes):
    assert round(cache_bytes_per_token(config, dtype) * 128 * KI / 2**30, 2) == gibibytes


def test_partial_groups_of_the_latent_have_a_scale():
    odd = dataclasses.replace(V3, kv_lora_rank=500, num_hidden_layers=3)
    assert cache_bytes_per_token(odd, "fp8") == 3 * (500 + 4 * 4 + 2 * 64)


def test_cache_of_another_type_is_refused():
    with pytest.raises(ValueError, match="dtype: expected bfloat16 or fp8, got 'int8'"):
        cache_bytes_per_token(V3, "int8")  # pyright: ignore[reportArgumentType]


# ---- operations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("context", [0, 4 * KI])
def test_linear_operations(phase, context):
    assert round(flops_per_token(V3, context, phase).linear / 1e9, 2) == 73.25


@pytest.mark.parametrize(
    ("phase", "context", "flops"),
    [
        # One key: 2 * 128 * (192 + 128) * 61 expanded, 2 * 128 * (576 + 512) * 61 absorbed.
        ("prefill", 2, 4_997_120),
        ("decode", 1, 16_990_208),
        ("prefill", 0, 0),
        ("decode", 0, 0),
    ],
)
def test_attention_of_one_key(phase, context, flops):
    assert flops_per_token(V3, context, phase).attention == flops


@pytest.mark.parametrize(
    ("phase", "context", "billions"),
    [
        ("prefill", 4 * KI, 10.2),
        ("prefill", 32 * KI, 81.9),
        ("prefill", 128 * KI, 327.5),
        ("decode", 4 * KI, 69.6),
        ("decode", 32 * KI, 556.7),
        ("decode", 128 * KI, 2226.9),
    ],
)
def test_attention_of_v3(phase, context, billions):
    flops = flops_per_token(V3, context, phase)
    assert round(flops.attention / 1e9, 1) == billions
    assert flops.indexer == 0
    assert flops.total == flops.linear + flops.attention


def test_sparse_decode_of_v3_2():
    flops = flops_per_token(V3_2, 128 * KI, "decode")
    assert round(flops.indexer / 1e9) == 131
    assert round(flops.attention / 1e9, 1) == 34.8
    assert flops.total == flops.linear + flops.attention + flops.indexer
    assert flops_per_token(V3_2, 1, "decode").indexer == 999_424


def test_sparse_attention_is_dense_up_to_index_topk_keys():
    for context in (1, 2047, 2048):
        sparse, dense = (flops_per_token(c, context, "decode") for c in (V3_2, V3))
        assert sparse.attention == dense.attention
    assert flops_per_token(V3_2, 2049, "decode").attention == dense.attention


def test_sparse_decode_saves_operations_from_2176_keys():
    def saved(context):
        sparse, dense = (flops_per_token(c, context, "decode") for c in (V3_2, V3))
        return dense.attention - sparse.attention - sparse.indexer

    assert saved(2170) < 0 < saved(2180)


@pytest.mark.parametrize("context", [100, 2048, 2049, 6000])
def test_sparse_prefill_averages_the_causal_triangle(context):
    flops = flops_per_token(V3_2, context, "prefill")
    # Position t attends to min(t, 2048) keys. The closed form is the integral, half a key less.
    keys = sum(min(t, 2048) for t in range(1, context + 1)) / context
    assert flops.attention / 16_990_208 == pytest.approx(keys, abs=0.51)
    assert flops.indexer == 999_424 * context / 2


def test_decode_intensity():
    # Operations per byte of the cache: 2 * 128 * 1088 / 1152.
    flops = flops_per_token(V3, 1, "decode").attention
    assert round(flops / cache_bytes_per_token(V3)) == 242


@pytest.mark.parametrize(
    ("context", "phase", "named"),
    [(1, "train", "phase: .*'train'"), (-1, "decode", "context: .*-1")],
)
def test_unknown_phases_and_negative_contexts_are_refused(context, phase, named):
    with pytest.raises(ValueError, match=named):
        flops_per_token(V3, context, phase)
