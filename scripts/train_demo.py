"""Trains the demo checkpoint: a miniature DeepSeek-V3 on the Python standard library.

    python scripts/train_demo.py prepare --out runs/demo
    python scripts/train_demo.py train --data runs/demo --out runs/demo/checkpoint
    python scripts/train_demo.py plot --checkpoint runs/demo/checkpoint

`prepare` trains a byte-level BPE tokenizer and encodes every module (about a minute on a CPU);
`train` needs an accelerator to be pleasant (five minutes on one H200). The result is a directory in
DeepSeek's published format; it is what `dsv3_jax/demo` holds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import sysconfig
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import nnx
from tokenizers import decoders, models, pre_tokenizers, trainers

from dsv3_jax.checkpoint.parameters import load_model
from dsv3_jax.checkpoint.reader import CheckpointReader
from dsv3_jax.checkpoint.writer import write_checkpoint
from dsv3_jax.config import BlockQuantization, ModelConfig, YarnScaling
from dsv3_jax.model import DeepSeekV3, parameter_count
from dsv3_jax.training.step import Trainer, TrainingConfig, TrainingState

SPECIAL_TOKENS = [
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
]
BOS, EOS = 0, 1

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% else %}<｜Assistant｜>{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)

CONFIG = ModelConfig(
    model_type="deepseek_v3",
    vocab_size=2048,
    hidden_size=256,
    num_hidden_layers=5,
    first_k_dense_replace=1,
    intermediate_size=1024,
    moe_intermediate_size=128,
    n_routed_experts=16,
    n_shared_experts=1,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    topk_method="noaux_tc",
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    num_attention_heads=4,
    q_lora_rank=128,
    kv_lora_rank=128,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=64,
    rope_theta=10000.0,
    rope_scaling=YarnScaling(
        factor=4.0, original_max_position_embeddings=1024, mscale=1.0, mscale_all_dim=1.0
    ),
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    bos_token_id=BOS,
    eos_token_id=(EOS,),
    initializer_range=0.03,
    num_nextn_predict_layers=1,
)


def modules(stdlib: Path) -> Iterator[tuple[str, str]]:
    """(relative name, text) of every module of the standard library that is valid UTF-8."""
    for path in sorted(stdlib.rglob("*.py")):
        name = path.relative_to(stdlib).as_posix()
        if "site-packages" in name or "bad_coding" in name or "lib2to3/tests/data" in name:
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            yield name, text


def held_out(name: str) -> bool:
    """About one module in 25, by its name alone."""
    return zlib.crc32(name.encode()) % 25 == 0


def prepare(stdlib: Path, out: Path) -> None:
    texts = list(modules(stdlib))
    training = [text for name, text in texts if not held_out(name)]
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG.vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training, trainer)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": SPECIAL_TOKENS[BOS],
        "eos_token": SPECIAL_TOKENS[EOS],
        "pad_token": SPECIAL_TOKENS[2],
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": CONFIG.max_position_embeddings,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (out / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    streams: dict[str, list[int]] = {"train": [], "held_out": []}
    for (name, _), encoding in zip(
        texts, tokenizer.encode_batch([text for _, text in texts]), strict=True
    ):
        streams["held_out" if held_out(name) else "train"] += [BOS, *encoding.ids, EOS]
    arrays = {name: np.array(ids, np.uint16) for name, ids in streams.items()}
    np.savez_compressed(out / "tokens.npz", train=arrays["train"], held_out=arrays["held_out"])
    corpus = {
        "python": sys.version.split()[0],
        "modules": len(texts),
        "characters": sum(len(text) for _, text in texts),
        "tokens": {name: len(array) for name, array in arrays.items()},
    }
    (out / "corpus.json").write_text(json.dumps(corpus, indent=1) + "\n")
    print(json.dumps(corpus))


def batches(tokens: np.ndarray, batch: int, length: int, seed: int) -> Iterator[np.ndarray]:
    """Random windows of the stream, for ever."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(tokens) - length, batch)
        yield np.stack([tokens[s : s + length] for s in starts]).astype(np.int32)


def evaluate(
    trainer: Trainer, state: TrainingState, tokens: np.ndarray, batch: int, length: int
) -> dict[str, float]:
    """Held-out losses over consecutive windows, without a last batch that would not be full."""
    count = len(tokens) // (batch * length) * batch
    windows = tokens[: count * length].reshape(-1, batch, length).astype(np.int32)
    found = [jax.device_get(trainer.evaluate(state, jnp.asarray(w))) for w in windows]
    return {
        "main_loss": float(np.mean([f.main for f in found])),
        "mtp_loss": float(np.mean([f.mtp for f in found])),
        "mtp_top1_agreement": float(np.mean([f.mtp_agreement for f in found])),
    }


def train(data: Path, out: Path, steps: int, batch: int, length: int, seed: int) -> None:
    if out.exists():
        raise SystemExit(f"train_demo: {out} exists; expected a directory to create")
    stored = np.load(data / "tokens.npz")
    tokens, held = stored["train"], stored["held_out"]
    model = DeepSeekV3(CONFIG, rngs=nnx.Rngs(seed))
    trainer = Trainer(
        model, TrainingConfig(steps=steps, learning_rate=3e-3, final_learning_rate=1e-4)
    )
    state = trainer.init()
    print(f"{parameter_count(model)} parameters and {parameter_count(model, mtp=True)} for MTP")
    curve = []
    began = time.perf_counter()
    for i, window in enumerate(batches(tokens, batch, length, seed), 1):
        state, metrics = trainer.step(state, jnp.asarray(window))
        if i % 100 == 0 or i == 1 or i == steps:
            row = {
                "step": i,
                "main_loss": float(metrics.losses.main),
                "mtp_loss": float(metrics.losses.mtp),
                "expert_imbalance": float(metrics.expert_imbalance),
                "seconds": round(time.perf_counter() - began, 1),
            }
            if i % 1000 == 0 or i == steps:
                row["held_out"] = evaluate(trainer, state, held, batch, length)
            curve.append(row)
            print(json.dumps(row), flush=True)
        if i == steps:
            break
    write_checkpoint(trainer.model(state), out, quantization=BlockQuantization())
    for name in ("tokenizer.json", "tokenizer_config.json", "corpus.json"):
        shutil.copy(data / name, out / name)
    published = load_model(
        ModelConfig.from_hf(out), CheckpointReader(out), dtype=jnp.float32, quantization=None
    )
    quantized = Trainer(published, trainer.config)
    result = {
        "steps": steps,
        "batch": batch,
        "length": length,
        "seed": seed,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "train_tokens": len(tokens),
        "held_out_tokens": len(held),
        "held_out_float8": evaluate(quantized, quantized.init(), held, batch, length),
        "curve": curve,
    }
    (out / "training.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["held_out_float8"]))


def plot(checkpoint: Path) -> None:
    """Draws the curve in training.json as loss.png beside it."""
    from matplotlib.figure import Figure  # of the dev extra

    curve = json.loads((checkpoint / "training.json").read_text())["curve"]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    held = [row for row in curve if "held_out" in row]
    for key, label in (("main_loss", "next token"), ("mtp_loss", "MTP, token after next")):
        steps = [row["step"] for row in curve]
        (line,) = axes.plot(steps, [row[key] for row in curve], label=f"training: {label}", lw=1)
        axes.plot(
            [row["step"] for row in held],
            [row["held_out"][key] for row in held],
            "o",
            color=line.get_color(),
            label=f"held out: {label}",
        )
    axes.set(xlabel="step", ylabel="nats a token", ylim=(0.9, 4), title="The demo's training")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(checkpoint / "loss.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo checkpoint.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("prepare", help="tokenizer and token arrays")
    command.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")))
    command.add_argument("--out", type=Path, required=True)
    command = commands.add_parser("train", help="train and write the checkpoint")
    command.add_argument("--data", type=Path, required=True)
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--steps", type=int, default=2800)
    command.add_argument("--batch", type=int, default=32)
    command.add_argument("--length", type=int, default=1024)
    command.add_argument("--seed", type=int, default=0)
    command = commands.add_parser("plot", help="draw the loss curve")
    command.add_argument("--checkpoint", type=Path, required=True)
    arguments = vars(parser.parse_args())
    run = {"prepare": prepare, "train": train, "plot": plot}[arguments.pop("command")]
    run(**arguments)


if __name__ == "__main__":
    main()
