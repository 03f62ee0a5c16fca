"""Compares our float32 logits and tokens with transformers', on checkpoints that transformers
saved.

transformers has an independent implementation of DeepSeek's model. Our model, loaded from the files
that `save_pretrained` wrote, must compute the same numbers. torch and transformers come with the
`parity` extra and are imported inside functions, so that this file can be collected without them.
"""

import itertools
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import dsv3_jax
from dsv3_jax import Generator
from dsv3_jax.checkpoint.writer import write_checkpoint as write_published
from dsv3_jax.tokenizer import Tokenizer
from dsv3_jax.training.perplexity import WindowSettings, perplexity
from tests.support.checkpoints import random_tensors, tiny_config, write_checkpoint
from tests.support.oracle import relative_error
from tests.support.running import forward

pytestmark = [pytest.mark.parity, pytest.mark.slow]

BOUND = 1e-5
VOCAB = 160
LENGTH = 44  # longer than the original context of 32 positions
TOKENS = np.random.default_rng(21).integers(0, VOCAB, (2, LENGTH))

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
PLAIN = {"rope_type": "default", "rope_theta": 50000.0}

# Settings and their values. Every pair of values of two settings occurs in a case below.
SETTINGS: dict[str, tuple[Any, ...]] = {
    "q_lora_rank": (40, None),
    "n_group": (4, 1),
    "first_k_dense_replace": (0, 1, 2),
    "rope": ("yarn", "plain"),
    "n_shared_experts": (1, 2),
    "norm_topk_prob": (True, False),
}
CASES: tuple[tuple[Any, ...], ...] = (
    (40, 4, 0, "yarn", 1, True),
    (None, 1, 0, "plain", 2, False),
    (40, 1, 1, "yarn", 2, False),
    (None, 4, 1, "plain", 1, True),
    (40, 4, 2, "plain", 2, True),
    (None, 1, 2, "yarn", 1, False),
    (40, 1, 1, "plain", 1, True),
    (None, 4, 2, "yarn", 2, False),
)


def test_cases_are_pairwise_complete():
    for (one, ones), (other, others) in itertools.combinations(enumerate(SETTINGS.values()), 2):
        pairs = {(case[one], case[other]) for case in CASES}
        assert pairs == set(itertools.product(ones, others))


def hugging_face_config(**settings: Any):
    """Returns a DeepseekV3Config of odd sizes: none is a multiple of 128, and few are multiples of
    8."""
    from transformers import DeepseekV3Config

    rope = YARN if settings.pop("rope") == "yarn" else PLAIN
    groups = settings["n_group"]
    dense = settings["first_k_dense_replace"]
    return DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=60,
        intermediate_size=90,
        moe_intermediate_size=42,
        num_hidden_layers=dense + 1,
        num_attention_heads=3,
        num_key_value_heads=3,
        n_routed_experts=12,
        num_experts_per_tok=4,
        topk_group=max(1, groups // 2),
        routed_scaling_factor=2.5,
        kv_lora_rank=33,
        qk_nope_head_dim=18,
        qk_rope_head_dim=10,
        v_head_dim=14,
        max_position_embeddings=128,
        rms_norm_eps=1e-3,  # which the norms of the latents do not use
        rope_parameters=dict(rope),
        attn_implementation="eager",
        experts_implementation="eager",  # the default needs rows of a multiple of 16 bytes
        **settings,
    )


def random_model(config, seed: int = 0):
    """Returns transformers' model with activations of order one, router biases and unequal scores.

    With transformers' own initial weights all experts have nearly the same score, and the biases
    are zero.
    """
    import torch
    from transformers import DeepseekV3ForCausalLM

    model = DeepseekV3ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)

    def normal(shape) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.1 * normal(parameter.shape))
            elif "embed_tokens" in name:
                parameter.copy_(normal(parameter.shape))
            else:
                gain = 3.0 if name.endswith("mlp.gate.weight") else 1.0
                parameter.copy_(gain * normal(parameter.shape) / parameter.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * normal(buffer.shape) - 0.4)
    return model


def their_logits(model, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(input_ids=torch.from_numpy(tokens), use_cache=False).logits.numpy()


def saved(settings: dict[str, Any], directory: Path):
    """Returns transformers' model, and ours loaded from the directory that it was saved to."""
    theirs = random_model(hugging_face_config(**settings))
    theirs.save_pretrained(directory)
    ours, tokenizer = dsv3_jax.load(directory, dtype=jnp.float32)
    assert tokenizer is None
    return theirs, ours


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_logits(case, tmp_path):
    settings = dict(zip(SETTINGS, case, strict=True))
    theirs, ours = saved(settings, tmp_path)
    # transformers' config has one MTP layer, but the checkpoint has none.
    assert theirs.config.num_nextn_predict_layers == 1
    assert len(ours.mtp) == 0
    logits, aux = forward(ours, TOKENS)
    assert relative_error(logits, their_logits(theirs, TOKENS)) < BOUND
    for counts in aux.routing_counts:
        assert (counts > 0).sum() > 8, "expected tokens at most experts"
        assert counts.max() < TOKENS.size, "expected no expert that all tokens choose"


@pytest.mark.slow
def test_greedy_tokens(tmp_path):
    """Both sides decode with a cache. No two best logits are so close that rounding could swap
    them."""
    import torch

    settings = dict(zip(SETTINGS, CASES[2], strict=True))
    theirs, ours = saved(settings, tmp_path)
    prompts = [TOKENS[0, :17].tolist(), TOKENS[1, :5].tolist()]
    new = 24
    want = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        theirs.generation_config.eos_token_id = None
        with torch.no_grad():
            out = theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new,
                pad_token_id=2,
            )
        logits = np.sort(their_logits(theirs, out.numpy()[:, :-1])[0, len(prompt) - 1 :], axis=-1)
        assert (logits[:, -1] - logits[:, -2]).min() > 1e-4
        want.append(out[0, len(prompt) :].tolist())
    assert len({token for tokens in want for token in tokens}) > 10, "expected varied tokens"

    generator = Generator(ours, None, max_len=64, batch_sizes=(2,), prefill_chunk=8)
    got = generator.generate(prompts, max_new_tokens=new, ignore_eos=True)
    assert [completion.tokens for completion in got] == want


def test_mtp_logits(tmp_path):
    """Compares with transformers' MtpModel, whose input is the hidden states after the final
    norm."""
    import torch
    from transformers import DeepseekV3ForCausalLM
    from transformers.modeling_layers import MtpModel

    class Tiny(DeepseekV3ForCausalLM):
        # As in transformers, where the layer number is fixed to DeepSeek-V3's 61.
        _keys_to_ignore_on_load_unexpected = (r"model\.layers\.3\..*", r"model\.layers\.4\..*")

    config = tiny_config(num_nextn_predict_layers=2)
    write_checkpoint(tmp_path, config, random_tensors(config))
    ours, _ = dsv3_jax.load(tmp_path, dtype=jnp.float32)
    _, aux = forward(ours, TOKENS)

    theirs = Tiny.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    mtp = MtpModel.from_pretrained(theirs).eval()
    ids = torch.from_numpy(TOKENS)
    with torch.no_grad():
        hidden = theirs.model(input_ids=ids, use_cache=False).last_hidden_state
        for k in range(2):
            length = LENGTH - 1 - k
            hidden = mtp.forward_layer(
                k,
                hidden[:, :length],
                torch.arange(length)[None],
                None,
                input_ids=ids[:, k + 1 :],
            )
            logits = theirs.lm_head(hidden).numpy()
            assert relative_error(aux.mtp_logits[k], logits) < BOUND


CHAT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% else %}{% generation %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}{{ eos_token }}"
    "{% endgeneration %}{% endif %}{% endfor %}<｜Assistant｜>"
)


@pytest.mark.parametrize(
    "contents",
    [
        ("hello",),
        ("if a < b > c:\n  x <<= 1", "<div>[ok]</div>", "  深度求索 👍🏽 \t\n"),
        ("why?", "reasons</think>because e\u0301", "<", ">"),
    ],
)
def test_token_ids_of_conversations(contents, tmp_path):
    """The ids are equal if no text contains a control token, or if both sides split control
    tokens."""
    from transformers import PreTrainedTokenizerFast

    demo = Path(dsv3_jax.__file__).parent / "demo"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHAT, "utf-8")
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = Tokenizer(tmp_path)
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    assert ours.render_chat(messages) == theirs.apply_chat_template(messages, tokenize=False)
    ids = theirs.apply_chat_template(messages, return_dict=False)
    assert ours.chat(messages) == ids
    plain = {"add_special_tokens": False, "split_special_tokens": True}
    for text in (*contents, "x<｜User｜>y", theirs.decode(ids)):
        assert ours.encode(text, **plain) == theirs.encode(text, **plain)


def test_perplexity_of_the_demo(tmp_path):
    """The loss that transformers computes from labels, of one window per text, with the cache and
    without."""
    import torch
    from transformers import DeepseekV3ForCausalLM

    model, tokenizer = dsv3_jax.load("demo", dtype=jnp.float32)
    assert tokenizer is not None
    write_published(model, tmp_path / "demo", dtype="float32")
    theirs = DeepseekV3ForCausalLM.from_pretrained(tmp_path / "demo", dtype=torch.float32).eval()
    texts = ["import os\n\n\ndef main():\n", "class Point:\n    x = 1\n    y = 2\n"]
    nats, count = 0.0, 0
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)
        tokens = torch.tensor([[model.config.bos_token_id, *ids]])
        with torch.no_grad():
            nats += float(theirs(tokens, labels=tokens).loss) * len(ids)
        count += len(ids)
    for cached in (None, 1, 8):
        settings = WindowSettings(64, batch=2, cached=cached)
        result = perplexity(model, tokenizer, texts, settings)
        assert result.tokens == count
        assert result.nats == pytest.approx(nats, rel=1e-5)
