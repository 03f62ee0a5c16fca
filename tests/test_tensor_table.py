"""The table of published tensors, compared with headers of published files and with accounting.

Counts and sums of elements of V3/R1, V3.2, Kimi-K2 and V2-Lite are those in listings of the
published safetensors headers, scales included.
"""

import dataclasses
import functools
import hashlib
import re
from collections import Counter
from itertools import groupby

import pytest

from dsv3_jax import presets
from dsv3_jax.accounting import checkpoint_bytes, count_parameters
from dsv3_jax.checkpoint import tensor_table as table_module
from dsv3_jax.checkpoint.tensor_table import UNUSED_SUFFIXES, TensorSpec, copies
from dsv3_jax.quantization import BlockQuantization
from tests.support import sparse
from tests.support.checkpoints import tensor_shapes
from tests.support.covering import slow_except

TINY = dataclasses.replace(
    presets.DEEPSEEK_V3_2,
    vocab_size=100,
    hidden_size=96,
    num_hidden_layers=3,
    first_k_dense_replace=1,
    intermediate_size=80,
    moe_intermediate_size=40,
    n_routed_experts=8,
    n_shared_experts=2,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    num_attention_heads=2,
    q_lora_rank=48,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=24,
    num_nextn_predict_layers=2,
    index_n_heads=2,
    index_head_dim=16,
    index_topk=4,
    quantization=BlockQuantization((32, 64), scale_suffix=".scale"),
)
EVERY = {
    **presets.PRESETS,
    "tiny": TINY,
    "tiny-float32": dataclasses.replace(TINY, quantization=None, dtype="float32"),
    "tiny-float16": dataclasses.replace(
        TINY,
        model_type="deepseek_v3",
        index_n_heads=None,
        index_head_dim=None,
        index_topk=None,
        n_shared_experts=0,
        dtype="float16",
    ),
}


slow = functools.partial(pytest.param, marks=pytest.mark.slow)

# V3 and Kimi-K2 have a hundred thousand tensors each.
tensor_table = functools.cache(table_module.tensor_table)


@pytest.fixture(scope="module")
def v3():
    return tensor_table(presets.DEEPSEEK_V3)


@pytest.fixture(scope="module")
def v3_2():
    return tensor_table(presets.DEEPSEEK_V3_2)


# ---- whole tables --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tensors", "elements"),
    [
        ("deepseek-v3", 91_991, 684_531_386_000),
        ("deepseek-v3.2", 92_425, 685_396_921_376),
        # The published files also have a rope buffer of 56 values in each of 61 layers.
        slow("kimi-k2", 139_644 - 61, 1_026_470_731_056 - 61 * 56),
        ("deepseek-v2-lite", 5_291, 15_706_484_224),
    ],
)
def test_tables_of_published_files(name, tensors, elements):
    table = tensor_table(presets.get(name))
    assert len(table) == tensors
    assert sum(spec.size for spec in table.values()) == elements


def test_bytes_of_v3(v3):
    assert sum(spec.nbytes for spec in v3.values()) == 688_574_839_360


@pytest.mark.parametrize(
    ("name", "nbytes", "layers", "digest"),
    [
        (
            "deepseek-v3",
            688_574_839_360,
            [(3, 20), (58, 1558), (1, 1564)],
            "f2b6fc059a922ec40758de9a94f591fe2f8b6731a30fd8bd8c80fc169ec45faf",
        ),
        slow(
            "deepseek-v3.2",
            689_471_107_200,
            [(3, 27), (58, 1565), (1, 1571)],
            "4732c4312cd2379496c78f03b656407d7fe6a5775062762788251ecb23f0733e",
        ),
        slow(
            "kimi-k2",
            1_029_173_249_888,
            [(1, 20), (60, 2326)],
            "52813445e590ce10831a0c400ae0f2ed269efe1eef178590bcff970e51d86a28",
        ),
        (
            "deepseek-v2",
            471_482_869_760,
            [(1, 12), (59, 493)],
            "4a8639bebfbdfbd83f1689def93744757c672b423544f5c7283384979b1d3e28",
        ),
        (
            "deepseek-v2-lite",
            31_412_968_448,
            [(1, 10), (26, 203)],
            "24cc0f6bf5e4664f791ca615989f7aa094df152a00be974587e6644a2ed66d67",
        ),
        (
            "moonlight-16b",
            31_920_223_744,
            [(1, 10), (26, 204)],
            "115ff1b2f50b1a63cb2bc97dd0d94bf99a3c551337055def16ef14ecd4a60e07",
        ),
    ],
)
def test_tables_have_not_changed(name, nbytes, layers, digest):
    """Total bytes, runs of (layers, tensors per layer), and the SHA-256 of "name dtype shape"
    lines.
    """
    table = tensor_table(presets.get(name))
    assert sum(spec.nbytes for spec in table.values()) == nbytes
    count = Counter(int(m[1]) for n in table if (m := re.match(r"model\.layers\.(\d+)\.", n)))
    runs = groupby(count[layer] for layer in range(len(count)))
    assert [(len(list(run)), tensors) for tensors, run in runs] == layers
    assert len(table) - count.total() == 3  # embedding, final norm, head
    lines = (f"{n} {s.dtype} {'x'.join(map(str, s.shape))}\n" for n, s in sorted(table.items()))
    assert hashlib.sha256("".join(lines).encode()).hexdigest() == digest


@pytest.mark.parametrize("name", ["deepseek-v3", slow("kimi-k2")])
def test_the_table_of_another_author(name):
    """Lists the tensors independently of the table under test."""
    config = presets.get(name)
    table = {n: (spec.dtype, spec.shape) for n, spec in tensor_table(config).items()}
    assert table == sparse.entries(config.to_hf())


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v2-lite", "moonlight-16b"])
def test_the_shapes_of_another_author(name):
    config = presets.get(name)
    shapes = {n: spec.shape for n, spec in tensor_table(config).items()}
    assert shapes == tensor_shapes(config.to_hf())


def test_types_of_v3(v3):
    by_type = {t: [s for s in v3.values() if s.dtype == t] for t in ("F8_E4M3", "F32", "BF16")}
    scales = [name for name in v3 if name.endswith("_scale_inv")]
    assert len(by_type["F8_E4M3"]) == len(scales) == 45_808
    assert len(v3) - 2 * 45_808 == 375
    # Float32: the scales and 59 selection biases.
    assert len(by_type["F32"]) == 45_808 + 59
    assert round(sum(s.nbytes for s in by_type["F8_E4M3"]) / 1e9, 3) == 680.571
    assert round(sum(s.nbytes for s in by_type["BF16"]) / 1e9, 3) == 7.838
    assert round(sum(v3[name].nbytes for name in scales) / 1e9, 3) == 0.166


# Models with tables; V3.1 and R1 have the same tensors as V3.
DIFFERENT = [name for name in EVERY if name not in ("deepseek-r1", "deepseek-v3.1")]


def test_models_with_the_table_of_v3(v3):
    for name in EVERY.keys() - set(DIFFERENT):
        assert tensor_table(EVERY[name]) == v3
        assert copies(EVERY[name]) == copies(presets.DEEPSEEK_V3)


@pytest.mark.parametrize("name", slow_except(DIFFERENT, quick=(0,)))
def test_the_table_is_what_accounting_counts(name):
    config = EVERY[name]
    table, count = tensor_table(config), count_parameters(config)
    suffix = config.quantization.scale_suffix if config.quantization else "no scales"
    total = dict.fromkeys(vars(count), 0)
    for tensor, spec in table.items():
        if not tensor.endswith(suffix):
            total[component_of(tensor, config)] += spec.size
    assert total == vars(count)
    assert sum(spec.nbytes for spec in table.values()) == checkpoint_bytes(config)


def component_of(name, config):
    """Returns the field of ParameterCount that a published tensor belongs to, by its name."""
    if match := re.match(r"model\.layers\.(\d+)\.(.*)", name):
        layer, rest = int(match[1]), match[2]
        if layer >= config.num_hidden_layers:
            return "mtp_copies" if rest.startswith(("embed_", "shared_head.head")) else "mtp"
        for prefix, component in (
            ("self_attn.indexer.", "indexer"),
            ("self_attn.", "attention"),
            ("mlp.gate.", "router"),
            ("mlp.experts.", "routed_experts"),
            ("mlp.shared_experts.", "shared_experts"),
            ("mlp.", "dense_mlp"),
        ):
            if rest.startswith(prefix):
                return component
        return "layer_norms"
    return "embed_tokens" if "embed" in name else "final_norm_and_head"


@pytest.mark.parametrize("name", slow_except(DIFFERENT, quick=(0,)))
def test_bytes_without_the_copies(name):
    config = EVERY[name]
    table = tensor_table(config)
    left_out = copies(config)
    size = sum(spec.nbytes for tensor, spec in table.items() if tensor not in left_out)
    assert size == checkpoint_bytes(config, mtp_copies=False)


# ---- single tensors ------------------------------------------------------------------------------

ATTENTION = "model.layers.7.self_attn."
MTP = "model.layers.61."


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("model.embed_tokens.weight", (129280, 7168), "BF16"),
        ("model.norm.weight", (7168,), "BF16"),
        ("lm_head.weight", (129280, 7168), "BF16"),
        ("model.layers.0.input_layernorm.weight", (7168,), "BF16"),
        ("model.layers.60.post_attention_layernorm.weight", (7168,), "BF16"),
        (ATTENTION + "q_a_proj.weight", (1536, 7168), "F8_E4M3"),
        (ATTENTION + "q_a_proj.weight_scale_inv", (12, 56), "F32"),
        (ATTENTION + "q_a_layernorm.weight", (1536,), "BF16"),
        (ATTENTION + "q_b_proj.weight", (24576, 1536), "F8_E4M3"),
        (ATTENTION + "q_b_proj.weight_scale_inv", (192, 12), "F32"),
        (ATTENTION + "kv_a_proj_with_mqa.weight", (576, 7168), "F8_E4M3"),
        # 576 rows are four and a half blocks.
        (ATTENTION + "kv_a_proj_with_mqa.weight_scale_inv", (5, 56), "F32"),
        (ATTENTION + "kv_a_layernorm.weight", (512,), "BF16"),
        (ATTENTION + "kv_b_proj.weight", (32768, 512), "F8_E4M3"),
        (ATTENTION + "kv_b_proj.weight_scale_inv", (256, 4), "F32"),
        (ATTENTION + "o_proj.weight", (7168, 16384), "F8_E4M3"),
        (ATTENTION + "o_proj.weight_scale_inv", (56, 128), "F32"),
        ("model.layers.2.mlp.gate_proj.weight", (18432, 7168), "F8_E4M3"),
        ("model.layers.2.mlp.up_proj.weight_scale_inv", (144, 56), "F32"),
        ("model.layers.2.mlp.down_proj.weight_scale_inv", (56, 144), "F32"),
        ("model.layers.3.mlp.gate.weight", (256, 7168), "BF16"),
        ("model.layers.3.mlp.gate.e_score_correction_bias", (256,), "F32"),
        ("model.layers.3.mlp.experts.0.gate_proj.weight", (2048, 7168), "F8_E4M3"),
        ("model.layers.60.mlp.experts.255.up_proj.weight_scale_inv", (16, 56), "F32"),
        ("model.layers.60.mlp.experts.255.down_proj.weight", (7168, 2048), "F8_E4M3"),
        ("model.layers.60.mlp.experts.255.down_proj.weight_scale_inv", (56, 16), "F32"),
        ("model.layers.3.mlp.shared_experts.down_proj.weight", (7168, 2048), "F8_E4M3"),
        (MTP + "embed_tokens.weight", (129280, 7168), "BF16"),
        (MTP + "enorm.weight", (7168,), "BF16"),
        (MTP + "hnorm.weight", (7168,), "BF16"),
        (MTP + "eh_proj.weight", (7168, 14336), "BF16"),
        (MTP + "shared_head.norm.weight", (7168,), "BF16"),
        (MTP + "shared_head.head.weight", (129280, 7168), "BF16"),
        (MTP + "mlp.experts.17.gate_proj.weight", (2048, 7168), "F8_E4M3"),
        (MTP + "self_attn.kv_a_proj_with_mqa.weight_scale_inv", (5, 56), "F32"),
    ],
)
def test_tensors_of_v3(v3, name, shape, dtype):
    assert v3[name] == TensorSpec(shape, dtype)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.mlp.gate.weight",
        "model.layers.3.mlp.gate_proj.weight",
        "model.layers.60.mlp.experts.256.up_proj.weight",
        "model.layers.60.eh_proj.weight",
        "model.layers.62.enorm.weight",
        "model.layers.61.eh_proj.weight_scale_inv",
        "model.layers.5.mlp.gate.weight_scale_inv",
        "model.embed_tokens.weight_scale_inv",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.indexer.wk.weight",
    ],
)
def test_tensors_that_v3_has_not(v3, name):
    assert name not in v3


@pytest.mark.parametrize("layer", [0, 60, 61])
@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("wq_b.weight", (8192, 1536), "F8_E4M3"),
        ("wq_b.weight_scale_inv", (64, 12), "F32"),
        ("wk.weight", (128, 7168), "F8_E4M3"),
        ("wk.weight_scale_inv", (1, 56), "F32"),
        ("k_norm.weight", (128,), "F32"),
        ("k_norm.bias", (128,), "F32"),
        ("weights_proj.weight", (64, 7168), "BF16"),
    ],
)
def test_indexer_of_v3_2(v3_2, layer, name, shape, dtype):
    assert v3_2[f"model.layers.{layer}.self_attn.indexer.{name}"] == TensorSpec(shape, dtype)


def test_norms_of_v3_2_are_float32(v3_2):
    norms = {name: spec for name, spec in v3_2.items() if re.search(r"norm\.(weight|bias)$", name)}
    # Two norms, two latent norms and a LayerNorm of two a layer; three of the MTP layer, the final.
    assert len(norms) == 62 * 6 + 3 + 1
    assert {spec.dtype for spec in norms.values()} == {"F32"}
    assert v3_2["model.layers.61.eh_proj.weight"].dtype == "BF16"


def test_v2_lite_has_one_query_matrix_and_no_bias():
    table = tensor_table(presets.DEEPSEEK_V2_LITE)
    assert table["model.layers.0.self_attn.q_proj.weight"] == TensorSpec((3072, 2048), "BF16")
    assert not [name for name in table if ".q_a_" in name or ".q_b_" in name or "bias" in name]
    # Two shared experts are one MLP of twice the width.
    shared = table["model.layers.1.mlp.shared_experts.gate_proj.weight"]
    assert shared == TensorSpec((2816, 2048), "BF16")
    assert {spec.dtype for spec in table.values()} == {"BF16"}


def test_without_shared_experts_there_is_no_shared_mlp():
    config = EVERY["tiny-float16"]
    assert config.n_shared_experts == 0
    assert not [name for name in tensor_table(config) if "shared_experts" in name]


def test_moonlight_differs_from_v2_lite_by_its_biases():
    moonlight, lite = (
        set(tensor_table(c)) for c in (presets.MOONLIGHT_16B, presets.DEEPSEEK_V2_LITE)
    )
    assert moonlight - lite == {
        f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in range(1, 27)
    }
    assert not lite - moonlight


def test_grouped_softmax_routing_has_no_bias_either():
    assert not [name for name in tensor_table(presets.DEEPSEEK_V2) if "bias" in name]


def test_nothing_is_taken_for_granted_of_v3():
    table = tensor_table(TINY)
    # 40 of 8-wide rope and 32-wide latent rows in blocks of 32; 96 columns in blocks of 64.
    name = "model.layers.4.self_attn.kv_a_proj_with_mqa.weight"
    assert table[name] == TensorSpec((40, 96), "F8_E4M3")
    assert table[name + ".scale"] == TensorSpec((2, 2), "F32")
    assert not [name for name in table if name.endswith("_scale_inv")]
    assert table["model.layers.1.mlp.shared_experts.down_proj.weight"].shape == (96, 80)
    assert {name.split(".")[2] for name in table if "eh_proj" in name} == {"3", "4"}


@pytest.mark.parametrize(("dtype", "stored"), [("float32", "F32"), ("float16", "F16")])
def test_storage_follows_the_dtype(dtype, stored):
    config = dataclasses.replace(presets.DEEPSEEK_V2_LITE, dtype=dtype)
    assert {spec.dtype for spec in tensor_table(config).values()} == {stored}


def test_tables_run_in_the_order_data_flows(v3):
    layers = [int(m[1]) for name in v3 if (m := re.match(r"model\.layers\.(\d+)\.", name))]
    assert layers == sorted(layers)
    names = list(v3)
    assert names[0] == "model.embed_tokens.weight"
    assert names.index("lm_head.weight") < names.index("model.layers.61.embed_tokens.weight")


# ---- copies --------------------------------------------------------------------------------------


def test_copies_of_v3():
    assert copies(presets.DEEPSEEK_V3) == {
        "model.layers.61.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.61.shared_head.head.weight": "lm_head.weight",
    }


@pytest.mark.parametrize("name", DIFFERENT)
def test_copies_are_like_their_originals(name):
    config = EVERY[name]
    table = tensor_table(config)
    assert len(copies(config)) == 2 * config.num_nextn_predict_layers
    for copy, original in copies(config).items():
        assert copy != original
        assert table[copy] == table[original]


def test_unused_tensors_are_not_in_the_table():
    published = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert published.endswith(UNUSED_SUFFIXES)
    assert not [name for name in tensor_table(presets.KIMI_K2) if name.endswith(UNUSED_SUFFIXES)]


@pytest.mark.parametrize(
    ("spec", "size", "nbytes"),
    [
        (TensorSpec((3, 5), "F8_E4M3"), 15, 15),
        (TensorSpec((3, 5), "BF16"), 15, 30),
        (TensorSpec((3, 5), "F16"), 15, 30),
        (TensorSpec((3, 5), "F32"), 15, 60),
        (TensorSpec((), "F32"), 1, 4),
    ],
)
def test_sizes(spec, size, nbytes):
    assert (spec.size, spec.nbytes) == (size, nbytes)
