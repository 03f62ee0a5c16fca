"""Tiny checkpoints in the published Hugging Face format: config, random tensors, files on disk.

No size is a multiple of 128, so that every block-quantised tensor has a partial block. All are
below 128: for several blocks in one tensor, pass a smaller block or larger sizes.
"""

import json
import math
import zlib
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from .oracle import dequantize

Config = dict[str, Any]
Tensors = dict[str, npt.NDArray[Any]]

FP8_MAX = 448.0  # the largest float8_e4m3fn
BIAS = "e_score_correction_bias"


def tiny_config(**overrides: Any) -> Config:
    """Returns the config.json of a tiny DeepSeek-V3; `overrides` replace or add keys."""
    config: Config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "kv_lora_rank": 32,
        "max_position_embeddings": 128,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 48,
        "moe_layer_freq": 1,
        "n_group": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 1,
        "pretraining_tp": 1,
        "q_lora_rank": 40,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 4,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 32,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1",
        "use_cache": True,
        "v_head_dim": 12,
        "vocab_size": 160,
    }
    return {**config, **overrides}


def sparse_config(**overrides: Any) -> Config:
    """Returns the config.json of a tiny DeepSeek-V3.2, whose queries attend to 16 tokens.

    With 8 heads in the indexer, hardly any score is exactly 0, and ties are rare.
    """
    return tiny_config(
        **{
            "architectures": ["DeepseekV32ForCausalLM"],
            "model_type": "deepseek_v32",
            "index_n_heads": 8,
            "index_head_dim": 16,
            "index_topk": 16,
            **overrides,
        }
    )


def tensor_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Returns the name and shape of every tensor of the published checkpoint, without scales."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    layers = config["num_hidden_layers"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers + (config.get("num_nextn_predict_layers") or 0)):
        prefix = f"model.layers.{layer}"
        if layer >= layers:
            shapes[f"{prefix}.embed_tokens.weight"] = (vocab, hidden)
            shapes[f"{prefix}.enorm.weight"] = (hidden,)
            shapes[f"{prefix}.hnorm.weight"] = (hidden,)
            shapes[f"{prefix}.eh_proj.weight"] = (hidden, 2 * hidden)
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes |= _attention_shapes(f"{prefix}.self_attn", config)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        experts = config.get("n_routed_experts")
        if experts is None or layer < config["first_k_dense_replace"]:
            shapes |= _mlp_shapes(f"{prefix}.mlp", hidden, config["intermediate_size"])
        else:
            shapes |= _moe_shapes(f"{prefix}.mlp", config)
        if layer >= layers:
            shapes[f"{prefix}.shared_head.norm.weight"] = (hidden,)
            shapes[f"{prefix}.shared_head.head.weight"] = (vocab, hidden)
    shapes["model.norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _attention_shapes(prefix: str, config: Config) -> dict[str, tuple[int, ...]]:
    hidden, heads, rank = (
        config[name] for name in ("hidden_size", "num_attention_heads", "kv_lora_rank")
    )
    nope, rope, value = (
        config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    q_rank = config.get("q_lora_rank")
    shapes: dict[str, tuple[int, ...]] = {}
    if q_rank is None:
        shapes[f"{prefix}.q_proj.weight"] = (heads * (nope + rope), hidden)
    else:
        shapes[f"{prefix}.q_a_proj.weight"] = (q_rank, hidden)
        shapes[f"{prefix}.q_a_layernorm.weight"] = (q_rank,)
        shapes[f"{prefix}.q_b_proj.weight"] = (heads * (nope + rope), q_rank)
    shapes[f"{prefix}.kv_a_proj_with_mqa.weight"] = (rank + rope, hidden)
    shapes[f"{prefix}.kv_a_layernorm.weight"] = (rank,)
    shapes[f"{prefix}.kv_b_proj.weight"] = (heads * (nope + value), rank)
    shapes[f"{prefix}.o_proj.weight"] = (hidden, heads * value)
    if "index_topk" in config:
        width, index_heads = config["index_head_dim"], config["index_n_heads"]
        shapes[f"{prefix}.indexer.wq_b.weight"] = (index_heads * width, config["q_lora_rank"])
        shapes[f"{prefix}.indexer.wk.weight"] = (width, hidden)
        shapes[f"{prefix}.indexer.k_norm.weight"] = (width,)
        shapes[f"{prefix}.indexer.k_norm.bias"] = (width,)
        shapes[f"{prefix}.indexer.weights_proj.weight"] = (index_heads, hidden)
    return shapes


def _moe_shapes(prefix: str, config: Config) -> dict[str, tuple[int, ...]]:
    hidden, width = config["hidden_size"], config["moe_intermediate_size"]
    experts, shared = config["n_routed_experts"], config.get("n_shared_experts") or 0
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}.gate.weight": (experts, hidden)}
    if config["topk_method"] == "noaux_tc":
        shapes[f"{prefix}.gate.{BIAS}"] = (experts,)
    for expert in range(experts):
        shapes |= _mlp_shapes(f"{prefix}.experts.{expert}", hidden, width)
    if shared:
        shapes |= _mlp_shapes(f"{prefix}.shared_experts", hidden, shared * width)
    return shapes


def _mlp_shapes(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (width, hidden),
        f"{prefix}.up_proj.weight": (width, hidden),
        f"{prefix}.down_proj.weight": (hidden, width),
    }


def is_fp8(name: str) -> bool:
    """Returns whether a float8 checkpoint stores a tensor in float8: projections except eh_proj and
    the indexer's head weights."""
    ends = ("_proj.weight", "kv_a_proj_with_mqa.weight", "indexer.wq_b.weight", "indexer.wk.weight")
    return name.endswith(ends) and not name.endswith(("eh_proj.weight", "weights_proj.weight"))


def is_float32(name: str, config: Config) -> bool:
    """Returns whether a bfloat16 or float8 checkpoint stores a tensor in float32: router biases,
    and the norms of DeepSeek-V3.2."""
    norm = name.endswith(("norm.weight", "norm.bias"))
    return name.endswith(BIAS) or ("index_topk" in config and norm)


def random_tensors(config: Config, seed: int = 0) -> Tensors:
    """Returns a float32 tensor for every name of `tensor_shapes`. Activations are of order one.

    A tensor depends only on the seed and its own name, so that two configs have equal tensors where
    names and shapes are equal. With n from the normal distribution, norms are 1 + 0.1 n, matrices
    n / sqrt(in) and embeddings n. Router weights are three times as large, and the correction bias
    is 0.3 n around -0.4. Scores and bias then both influence the selection, and selected experts
    often have negative biased scores, which reveals a mask with 0 instead of -inf.
    """
    tensors: Tensors = {}
    for name, shape in tensor_shapes(config).items():
        normal = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape)
        if name.endswith(BIAS):
            value = -0.4 + 0.3 * (normal - normal.mean())
        elif name.endswith("k_norm.bias"):
            value = 0.3 * normal
        elif len(shape) == 1:
            value = 1 + 0.1 * normal
        elif name.endswith("embed_tokens.weight"):
            value = normal
        else:
            gain = 3.0 if name.endswith("mlp.gate.weight") else 1.0
            value = gain * normal / math.sqrt(shape[1])
        tensors[name] = value.astype(np.float32)
    for name in tensors:  # an MTP layer has exact copies of the embedding and the head
        if ".layers." in name and name.endswith(".embed_tokens.weight"):
            tensors[name] = tensors["model.embed_tokens.weight"].copy()
        elif name.endswith(".shared_head.head.weight"):
            tensors[name] = tensors["lm_head.weight"].copy()
    return tensors


def quantize_blocks(
    weight: npt.NDArray[Any], block: tuple[int, int] = (128, 128), *, power_of_two: bool = False
) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
    """Quantizes a matrix [out, in] to float8_e4m3fn with one float32 scale per block.

    Scales are [ceil(out/b0), ceil(in/b1)] and equal amax / 448; `power_of_two` rounds them up to
    powers of two (ue8m0). A block of zeros has scale 1.
    """
    rows, columns = weight.shape
    scale = np.ones((-(-rows // block[0]), -(-columns // block[1])), np.float32)
    quantized = np.zeros(weight.shape, ml_dtypes.float8_e4m3fn)
    for i, j in np.ndindex(scale.shape):
        part = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
        exact = float(np.abs(weight[part]).max()) / FP8_MAX
        if exact == 0:
            continue
        if power_of_two:
            mantissa, exponent = math.frexp(exact)  # mantissa in [1/2, 1)
            exact = math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)
        scale[i, j] = exact
        scaled = weight[part].astype(np.float64) / np.float64(scale[i, j])
        quantized[part] = np.clip(scaled, -FP8_MAX, FP8_MAX).astype(quantized.dtype)
    return quantized, scale


def write_checkpoint(
    directory: str | Path,
    config: Config,
    tensors: Tensors,
    *,
    dtype: Literal["float32", "bfloat16", "fp8"] = "float32",
    shards: int = 1,
    scales_in_other_shard: bool = False,
    scale_fmt: Literal["ue8m0"] | None = None,
    block: tuple[int, int] = (128, 128),
) -> Tensors:
    """Writes config.json and safetensors files. Returns the tensors that a correct loader must
    read, in float64.

    One shard is model.safetensors; more are model-0000i-of-0000n.safetensors with an index. Tensors
    are written in order. A scale follows its weight, or is in the next shard with
    `scales_in_other_shard`. With dtype bfloat16 or fp8 the correction bias stays float32, as
    published. With fp8, tensors that `is_fp8` excludes are bfloat16. The written config.json is
    `config` with the torch_dtype of the unquantised tensors and, for fp8, a quantization_config.

    Raises ValueError for an unknown dtype or scale_fmt, an option that needs fp8, or too few or too
    many shards.
    """
    if dtype not in ("float32", "bfloat16", "fp8") or scale_fmt not in (None, "ue8m0"):
        raise ValueError(f"unknown dtype {dtype!r} or scale_fmt {scale_fmt!r}")
    if (scale_fmt or scales_in_other_shard) and dtype != "fp8":
        raise ValueError(f"scale_fmt, scales_in_other_shard: expected dtype 'fp8', got {dtype!r}")
    least = 2 if scales_in_other_shard else 1
    if not least <= shards <= len(tensors):
        raise ValueError(f"shards: expected {least} to {len(tensors)}, got {shards}")

    files: list[Tensors] = [{} for _ in range(shards)]
    expected: Tensors = {}
    for index, (name, value) in enumerate(tensors.items()):
        shard = index * shards // len(tensors)
        if dtype == "fp8" and is_fp8(name):
            stored, scale = quantize_blocks(value, block, power_of_two=scale_fmt == "ue8m0")
            other = (shard + 1) % shards if scales_in_other_shard else shard
            files[other][f"{name}_scale_inv"] = scale
            expected[name] = dequantize(stored, scale, block)
        else:
            wide = dtype == "float32" or is_float32(name, config)
            stored = np.asarray(value).astype(np.float32 if wide else ml_dtypes.bfloat16)
            expected[name] = stored.astype(np.float64)
        files[shard][name] = np.ascontiguousarray(stored)

    published = {**config, "torch_dtype": "float32" if dtype == "float32" else "bfloat16"}
    if dtype == "fp8":
        published["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": list(block),
        }
        if scale_fmt is not None:
            published["quantization_config"]["scale_fmt"] = scale_fmt
    _write_files(Path(directory), published, files)
    return expected


def _write_files(directory: Path, config: Config, files: list[Tensors]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    weight_map: dict[str, str] = {}
    for number, content in enumerate(files, start=1):
        filename = "model.safetensors"
        if len(files) > 1:
            filename = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file(content, directory / filename, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(content, filename)
    if len(files) > 1:
        size = sum(value.nbytes for content in files for value in content.values())
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        path = directory / "model.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2) + "\n")
