"""Damages of a source, and what the refusal names."""

import re
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from tests.checkpoint import files
from tests.checkpoint.files import CONFIG, INDEX, Stored
from tests.checkpoint.harms import (
    BIAS,
    BLOCK,
    EMBEDDING,
    EXPERT,
    EXPERTS,
    FIRST,
    HEAD,
    KV_A,
    KV_A_SCALE,
    LAST_EXPERT,
    MTP,
    NORM,
    SECOND,
    THIRD,
    Harm,
    added,
    another_expert,
    code,
    config,
    config_without,
    duplicate_key,
    entry,
    file_content,
    gap,
    header_length,
    in_a_bit,
    in_bfloat16,
    in_two_shards,
    index,
    lost,
    quantization,
    relabelled,
    reshaped,
    shared_place,
    tensor,
    value,
    wrong_shard,
)


@dataclass(frozen=True)
class Damage:
    harm: Harm
    message: str
    """Pattern that occurs in the message: the name of a tensor or of a file."""
    source: str = "fp8"
    in_values: bool = False
    """Whether the damage is only visible in the values."""


def named(*names: str) -> str:
    """Returns a pattern for any of the names, but no longer name that begins or ends with one."""
    return "|".join(rf"(?<![\w.]){re.escape(name)}(?![\w]|\.\w)" for name in names)


FLOAT8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": list(BLOCK),
}
FLOAT8_NAN = (0x7F, 0xFF)
NAN = float("nan")

DAMAGES = {
    # ---- one file
    "empty file": Damage(file_content(SECOND, lambda content: b""), named(SECOND)),
    "truncated header length": Damage(file_content(SECOND, lambda c: c[:5]), named(SECOND)),
    "truncated header": Damage(
        file_content(SECOND, lambda c: c[: header_length(c) // 2]), named(SECOND)
    ),
    "header length too long": Damage(
        file_content(SECOND, lambda c: (len(c) - 7).to_bytes(8, "little") + c[8:]), named(SECOND)
    ),
    "header length absurd": Damage(
        file_content(SECOND, lambda c: bytes([255] * 8) + c[8:]), named(SECOND)
    ),
    "header length too short": Damage(
        file_content(SECOND, lambda c: (header_length(c) - 9).to_bytes(8, "little") + c[8:]),
        named(SECOND),
    ),
    "header not JSON": Damage(file_content(SECOND, lambda c: c[:8] + b"[" + c[9:]), named(SECOND)),
    "header not an object": Damage(
        lambda directory: files.join(directory / SECOND, [], b""), named(SECOND)
    ),
    "truncated data": Damage(file_content(SECOND, lambda c: c[:-1]), named(SECOND)),
    "no data": Damage(file_content(THIRD, lambda c: c[: header_length(c)]), named(THIRD)),
    "trailing bytes": Damage(file_content(SECOND, lambda c: c + b"\n"), named(SECOND)),
    "pickled weights": Damage(file_content(SECOND, lambda c: b"PK\3\4" + c), named(SECOND)),
    "duplicate in one header": Damage(duplicate_key, named(NORM)),
    "overlapping offsets": Damage(shared_place, named(FIRST)),
    "gap in offsets": Damage(gap, named(SECOND)),
    "offsets reversed": Damage(
        entry(NORM, lambda fields: fields["data_offsets"].reverse()), named(NORM)
    ),
    "unknown dtype": Damage(relabelled(NORM, "F4"), named(NORM)),
    "shard is a directory": Damage(
        lambda directory: ((directory / SECOND).unlink(), (directory / SECOND).mkdir()),
        named(SECOND),
    ),
    # ---- the index
    "missing shard": Damage(lambda directory: (directory / SECOND).unlink(), named(SECOND)),
    "index not JSON": Damage(file_content(INDEX, lambda c: c[:-9]), named(INDEX)),
    "index and files missing": Damage(lambda directory: (directory / INDEX).unlink(), named(INDEX)),
    "index points to a missing shard": Damage(
        index(lambda weight_map: weight_map.update({NORM: "model-4.safetensors"})),
        named("model-4.safetensors"),
    ),
    "index points to the wrong shard": Damage(wrong_shard, named(NORM)),
    "index leads out of the directory": Damage(
        index(lambda weight_map: weight_map.update({NORM: f"../source/{FIRST}"})), named(NORM)
    ),
    "index leaves a tensor out": Damage(
        index(lambda weight_map: weight_map.pop(NORM)), named(NORM)
    ),
    "index leaves a scale out": Damage(
        index(lambda weight_map: weight_map.pop(KV_A_SCALE)), named(KV_A_SCALE)
    ),
    "index names what no shard has": Damage(
        index(lambda weight_map: weight_map.update({"extra.weight": SECOND})),
        named("extra.weight"),
    ),
    "duplicate in two shards": Damage(in_two_shards, named(NORM)),
    # ---- which tensors there are
    "norm missing": Damage(lost(lambda name: name == NORM), named(NORM)),
    "embedding missing": Damage(lost(lambda name: name == EMBEDDING), named(EMBEDDING)),
    "bias missing": Damage(lost(lambda name: name == BIAS), named(BIAS)),
    "weight missing": Damage(lost(lambda name: name == KV_A), named(KV_A)),
    "weight missing with its scale": Damage(lost(lambda name: KV_A in name), named(KV_A)),
    "scale missing": Damage(lost(lambda name: name == KV_A_SCALE), named(KV_A_SCALE)),
    "scales missing": Damage(
        lost(lambda name: name.endswith("_scale_inv")), r"\S+\.weight_scale_inv\b"
    ),
    "tensor of an expert missing": Damage(lost(lambda name: name == EXPERT), named(EXPERT)),
    "last expert missing": Damage(
        lost(lambda name: name.startswith(f"{LAST_EXPERT}.")), re.escape(LAST_EXPERT)
    ),
    "one expert too many": Damage(added(another_expert(4)), re.escape(f"{EXPERTS}.4.")),
    "layer missing": Damage(
        lost(lambda name: name.startswith("model.layers.1.")), r"model\.layers\.1\."
    ),
    "unknown tensor": Damage(
        added({"model.layers.0.mlp.extra.weight": Stored.of(np.ones(3, np.float32))}),
        named("model.layers.0.mlp.extra.weight"),
    ),
    "bias of a projection": Damage(
        added({f"{KV_A[:-7]}.bias": Stored.of(np.ones(40, ml_dtypes.bfloat16))}),
        named(f"{KV_A[:-7]}.bias"),
    ),
    "scale of the embedding": Damage(
        added({f"{EMBEDDING}_scale_inv": Stored.of(np.ones((10, 2), np.float32))}),
        named(f"{EMBEDDING}_scale_inv"),
    ),
    # ---- dtypes
    "float8 weight called I8": Damage(relabelled(KV_A, "I8"), named(KV_A)),
    "float8 weight called U8": Damage(relabelled(KV_A, "U8"), named(KV_A)),
    "float8 weight called F8_E8M0": Damage(relabelled(KV_A, "F8_E8M0"), named(KV_A)),
    "expert called I8": Damage(relabelled(EXPERT, "I8"), named(EXPERT)),
    "norm called F16": Damage(relabelled(NORM, "F16"), named(NORM)),
    "embedding called F16": Damage(relabelled(EMBEDDING, "F16"), named(EMBEDDING)),
    "bias called I32": Damage(relabelled(BIAS, "I32"), named(BIAS)),
    "scale called I32": Damage(relabelled(KV_A_SCALE, "I32"), named(KV_A_SCALE)),
    "norm in float8": Damage(
        tensor(NORM, lambda _: Stored.of(np.ones(64, ml_dtypes.float8_e4m3fn))), named(NORM)
    ),
    "scale in float8": Damage(
        tensor(KV_A_SCALE, lambda _: Stored.of(np.ones((3, 2), ml_dtypes.float8_e4m3fn))),
        named(KV_A_SCALE),
    ),
    "one weight in bfloat16": Damage(tensor(KV_A, in_bfloat16), named(KV_A, KV_A_SCALE)),
    "one expert in bfloat16": Damage(
        tensor(EXPERT, in_bfloat16), named(EXPERT, f"{EXPERT}_scale_inv")
    ),
    # ---- shapes
    "weight of another shape": Damage(reshaped(KV_A, 80, 32), named(KV_A)),
    "weight transposed": Damage(reshaped(KV_A, 64, 40), named(KV_A)),
    "weight flat": Damage(reshaped(KV_A, 2560), named(KV_A)),
    "expert transposed": Damage(reshaped(EXPERT, 64, 48), named(EXPERT)),
    "a row short": Damage(
        tensor(EMBEDDING, lambda stored: Stored.of(stored.array[1:])), named(EMBEDDING)
    ),
    "norm of two axes": Damage(reshaped(NORM, 1, 64), named(NORM)),
    "scale transposed": Damage(reshaped(KV_A_SCALE, 2, 3), named(KV_A_SCALE)),
    "scale flat": Damage(reshaped(KV_A_SCALE, 6), named(KV_A_SCALE)),
    "one scale for all": Damage(
        tensor(KV_A_SCALE, lambda _: Stored.of(np.ones((1, 1), np.float32))), named(KV_A_SCALE)
    ),
    # ---- values
    **{
        f"scale {number}": Damage(
            value(KV_A_SCALE, number), named(KV_A_SCALE, KV_A), in_values=True
        )
        for number in (NAN, float("inf"), -float("inf"), -1e-4)
    },
    "scale nan of an expert": Damage(
        value(f"{EXPERT}_scale_inv", NAN), named(f"{EXPERT}_scale_inv", EXPERT), in_values=True
    ),
    **{
        f"weight {byte:#x}": Damage(code(KV_A, byte), named(KV_A), in_values=True)
        for byte in FLOAT8_NAN
    },
    **{
        f"expert {byte:#x}": Damage(code(EXPERT, byte), named(EXPERT), in_values=True)
        for byte in FLOAT8_NAN
    },
    "norm nan": Damage(value(NORM, NAN), named(NORM), in_values=True),
    "norm infinite": Damage(value(NORM, float("inf")), named(NORM), in_values=True),
    "bias nan": Damage(value(BIAS, NAN), named(BIAS), in_values=True),
    "bfloat16 weight nan": Damage(value(KV_A, NAN), named(KV_A), "bfloat16", in_values=True),
    "bfloat16 expert nan": Damage(value(EXPERT, NAN), named(EXPERT), "bfloat16", in_values=True),
    # ---- the MTP layer
    "MTP layer without its experts": Damage(
        lost(lambda name: name.startswith(f"{MTP}.mlp.experts.")), rf"{MTP}\.mlp\.experts\."
    ),
    "MTP layer without its projection": Damage(
        lost(lambda name: name == f"{MTP}.eh_proj.weight"), named(f"{MTP}.eh_proj.weight")
    ),
    "MTP layer without its attention": Damage(
        lost(lambda name: name.startswith(f"{MTP}.self_attn.")), rf"{MTP}\.self_attn\."
    ),
    "MTP embedding differs": Damage(
        tensor(f"{MTP}.embed_tokens.weight", in_a_bit),
        named(f"{MTP}.embed_tokens.weight"),
        in_values=True,
    ),
    "MTP head differs": Damage(
        tensor(f"{MTP}.shared_head.head.weight", in_a_bit),
        named(f"{MTP}.shared_head.head.weight"),
        in_values=True,
    ),
    "head differs from MTP": Damage(
        tensor(HEAD, in_a_bit), named(f"{MTP}.shared_head.head.weight"), in_values=True
    ),
    # ---- config.json
    "config missing": Damage(lambda directory: (directory / CONFIG).unlink(), named(CONFIG)),
    "config not JSON": Damage(file_content(CONFIG, lambda c: c[:-3]), named(CONFIG)),
    "config not an object": Damage(file_content(CONFIG, lambda c: b"[]"), named(CONFIG)),
    "config without vocab_size": Damage(config_without("vocab_size"), "vocab_size"),
    "unknown model_type": Damage(config(model_type="llama"), "model_type"),
    "unknown key": Damage(config(sliding_window=4), "sliding_window"),
    "more experts": Damage(config(n_routed_experts=6), re.escape(f"{EXPERTS}.4.")),
    "fewer experts": Damage(
        config(n_routed_experts=2, n_group=1, num_experts_per_tok=1), r"\.mlp\.|gate"
    ),
    "more layers": Damage(config(num_hidden_layers=3), r"model\.layers\.[23]\."),
    "fewer layers": Damage(config(num_hidden_layers=1), r"model\.layers\.[12]\."),
    "more dense layers": Damage(config(first_k_dense_replace=2), r"model\.layers\.1\.mlp\."),
    "another vocab_size": Damage(config(vocab_size=161), named(EMBEDDING)),
    "another hidden_size": Damage(config(hidden_size=128), r"\S+\.weight"),
    "another kv_lora_rank": Damage(config(kv_lora_rank=16), r"kv_\S+\.weight"),
    "another dtype": Damage(config(torch_dtype="float16"), r"\S+\.weight"),
    "quantization_config missing": Damage(
        config_without("quantization_config"), r"\S+\.weight(_scale_inv)?\b"
    ),
    "another weight_block_size": Damage(
        quantization(weight_block_size=[128, 128]), r"\S+\.weight_scale_inv"
    ),
    "weight_block_size transposed": Damage(
        quantization(weight_block_size=[40, 16]), r"\S+\.weight_scale_inv"
    ),
    "unknown quant_method": Damage(quantization(quant_method="awq"), "quant_method"),
    "unknown fmt": Damage(quantization(fmt="e5m2"), "quantization_config.fmt"),
    "unknown scale_fmt": Damage(quantization(scale_fmt="ue4m3"), "scale_fmt"),
    "quantization_config of bfloat16 weights": Damage(
        config(quantization_config=FLOAT8), r"\S+\.weight(_scale_inv)?\b", "bfloat16"
    ),
    "scale beside a bfloat16 weight": Damage(
        added({KV_A_SCALE: Stored.of(np.ones((3, 2), np.float32))}), named(KV_A_SCALE), "bfloat16"
    ),
}
