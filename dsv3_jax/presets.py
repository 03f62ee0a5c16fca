"""Configurations of the published models, as in the config.json of each."""

from dataclasses import replace

from dsv3_jax.config import ModelConfig
from dsv3_jax.quantization import BlockQuantization
from dsv3_jax.yarn import YarnScaling

DEEPSEEK_V3 = ModelConfig(
    model_type="deepseek_v3",
    vocab_size=129280,
    hidden_size=7168,
    num_hidden_layers=61,
    first_k_dense_replace=3,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    topk_method="noaux_tc",
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    num_attention_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    rope_theta=10000.0,
    rope_scaling=YarnScaling(
        factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0
    ),
    max_position_embeddings=163840,
    rms_norm_eps=1e-6,
    bos_token_id=0,
    eos_token_id=(1,),
    num_nextn_predict_layers=1,
    quantization=BlockQuantization(),
)
"""DeepSeek-V3, V3-0324, R1 and R1-0528, which differ only in their weights."""

DEEPSEEK_V3_1 = replace(DEEPSEEK_V3, quantization=BlockQuantization(scale_fmt="ue8m0"))
"""DeepSeek-V3.1: V3 with float8 scales that are powers of two."""

DEEPSEEK_V3_2 = replace(
    DEEPSEEK_V3_1, model_type="deepseek_v32", index_n_heads=64, index_head_dim=128, index_topk=2048
)
"""DeepSeek-V3.2 and V3.2-Exp: V3.1 with sparse attention."""

KIMI_K2 = replace(
    DEEPSEEK_V3,
    model_type="kimi_k2",
    vocab_size=163840,
    first_k_dense_replace=1,
    n_routed_experts=384,
    n_group=1,
    topk_group=1,
    routed_scaling_factor=2.827,
    num_attention_heads=64,
    rope_theta=50000.0,
    rope_scaling=YarnScaling(
        factor=32.0,
        original_max_position_embeddings=4096,
        beta_fast=1.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
    ),
    max_position_embeddings=131072,
    num_nextn_predict_layers=0,
    bos_token_id=163584,
    eos_token_id=(163585,),
)

DEEPSEEK_V2 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v2",
    vocab_size=102400,
    hidden_size=5120,
    num_hidden_layers=60,
    first_k_dense_replace=1,
    intermediate_size=12288,
    moe_intermediate_size=1536,
    n_routed_experts=160,
    n_shared_experts=2,
    num_experts_per_tok=6,
    n_group=8,
    topk_group=3,
    topk_method="group_limited_greedy",
    norm_topk_prob=False,
    routed_scaling_factor=16.0,
    num_nextn_predict_layers=0,
    bos_token_id=100000,
    eos_token_id=(100001,),
    quantization=None,
)

DEEPSEEK_V2_LITE = replace(
    DEEPSEEK_V2,
    hidden_size=2048,
    num_hidden_layers=27,
    intermediate_size=10944,
    moe_intermediate_size=1408,
    n_routed_experts=64,
    n_group=1,
    topk_group=1,
    topk_method="greedy",
    routed_scaling_factor=1.0,
    num_attention_heads=16,
    q_lora_rank=None,
    rope_scaling=YarnScaling(
        factor=40.0, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=0.707
    ),
)

MOONLIGHT_16B = replace(
    DEEPSEEK_V2_LITE,
    model_type="deepseek_v3",
    vocab_size=163840,
    intermediate_size=11264,
    topk_method="noaux_tc",
    norm_topk_prob=True,
    routed_scaling_factor=2.446,
    rope_theta=50000.0,
    rope_scaling=None,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    bos_token_id=163584,
    eos_token_id=(163586,),
)

PRESETS: dict[str, ModelConfig] = {
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-r1": DEEPSEEK_V3,
    "deepseek-v3.1": DEEPSEEK_V3_1,
    "deepseek-v3.2": DEEPSEEK_V3_2,
    "kimi-k2": KIMI_K2,
    "deepseek-v2": DEEPSEEK_V2,
    "deepseek-v2-lite": DEEPSEEK_V2_LITE,
    "moonlight-16b": MOONLIGHT_16B,
}
"""Presets by the names that commands use."""

HUB_NAMES = {
    preset: tuple(f"{organization}/{name}" for name in names.split())
    for preset, organization, names in (
        ("deepseek-v3", "deepseek-ai", "DeepSeek-V3 DeepSeek-V3-Base DeepSeek-V3-0324"),
        ("deepseek-r1", "deepseek-ai", "DeepSeek-R1 DeepSeek-R1-0528 DeepSeek-R1-Zero"),
        ("deepseek-v3.1", "deepseek-ai", "DeepSeek-V3.1 DeepSeek-V3.1-Base DeepSeek-V3.1-Terminus"),
        ("deepseek-v3.2", "deepseek-ai", "DeepSeek-V3.2 DeepSeek-V3.2-Exp"),
        ("kimi-k2", "moonshotai", "Kimi-K2-Instruct Kimi-K2-Base"),
        ("deepseek-v2", "deepseek-ai", "DeepSeek-V2 DeepSeek-V2-Chat"),
        ("deepseek-v2-lite", "deepseek-ai", "DeepSeek-V2-Lite DeepSeek-V2-Lite-Chat"),
        ("moonlight-16b", "moonshotai", "Moonlight-16B-A3B Moonlight-16B-A3B-Instruct"),
    )
}
"""Names on the Hugging Face Hub of the models that each preset describes, the plainest first."""


def name_of(name: str) -> str | None:
    """Returns the key of :data:`PRESETS` for a name of ours or on the Hub, or None if there is
    none. Upper and lower case are equivalent."""
    name = name.lower()
    if name in PRESETS:
        return name
    published = {hub.lower(): preset for preset, names in HUB_NAMES.items() for hub in names}
    # People leave out the organization, too.
    return published.get(name) or {n.partition("/")[2]: p for n, p in published.items()}.get(name)


def get(name: str) -> ModelConfig:
    """Returns the preset of that name, which may be one on the Hub, see :func:`name_of`.

    Raises:
      ValueError: no preset has the name; the message lists the names.
    """
    if (config := PRESETS.get(name_of(name) or "")) is None:
        raise ValueError(f"preset: expected one of {', '.join(PRESETS)}; got {name!r}")
    return config
