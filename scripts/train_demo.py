"""Trains the demo checkpoint: a miniature DeepSeek-V3 on the Python standard library.

    python scripts/train_demo.py prepare --out runs/demo
    python scripts/train_demo.py train --data runs/demo --out runs/demo/checkpoint
    python scripts/train_demo.py drafts --data runs/demo --checkpoint runs/demo/checkpoint \\
        --out runs/demo/with_drafts

`prepare` trains a byte-level BPE tokenizer and encodes every module, which takes about a minute on
a CPU. `train` takes five minutes on one H200, and needs matplotlib for the picture. `drafts` trains
the MTP layer to draft several tokens in turn, and changes no other weight. The result of both is a
directory in DeepSeek's published format. The run's checkpoints and metrics are next to it, in a
directory of the same name with the suffix `.run`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import nnx
from tokenizers import decoders, models, pre_tokenizers, trainers

from dsv3_jax.checkpoint.load import load
from dsv3_jax.checkpoint.reader import SafetensorsFile, write_file
from dsv3_jax.checkpoint.writer import write_checkpoint
from dsv3_jax.config import ModelConfig
from dsv3_jax.files import atomic_file, atomic_write
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.quantization import BlockQuantization
from dsv3_jax.tokenizer import Tokenizer
from dsv3_jax.tokenizer_files import with_bos_processor
from dsv3_jax.training import run as training_run
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.corpus import Corpus, is_held_out, pack, read_corpus
from dsv3_jax.training.evaluation import evaluate
from dsv3_jax.training.metrics_log import Entry
from dsv3_jax.training.settings import RunSettings
from dsv3_jax.viz.training import draw_run
from dsv3_jax.yarn import YarnScaling

SPECIAL_TOKENS = [
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
]
BOS, EOS = 0, 1
DRAFTS = 4  # that the MTP layer learns to propose in turn

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
    """Yields (relative name, text) of every module of the standard library in valid UTF-8."""
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


def prepare(stdlib: Path, out: Path) -> None:
    texts = list(modules(stdlib))
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG.vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    training = [text for name, text in texts if not is_held_out(name)]
    tokenizer.train_from_iterator(training, trainer)
    out.mkdir(parents=True, exist_ok=True)
    content = with_bos_processor(tokenizer.to_str(pretty=True), SPECIAL_TOKENS[BOS])
    atomic_write(out / "tokenizer.json", content)
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
    write_json(out / "tokenizer_config.json", settings)
    corpus = pack(texts, Tokenizer(out), BOS, EOS)
    arrays = {name: tokens.astype(np.uint16) for name, tokens in corpus._asdict().items()}
    with atomic_file(out / "tokens.npz") as file:
        np.savez_compressed(file, **arrays)
    summary = {
        "python": sys.version.split()[0],
        "modules": len(texts),
        "characters": sum(len(text) for _, text in texts),
        "tokens": {name: len(array) for name, array in arrays.items()},
    }
    write_json(out / "corpus.json", summary)
    print(json.dumps(summary))


def read(data: Path, out: Path) -> Corpus:
    """Returns the corpus of a training that creates ``out``."""
    if out.exists():
        raise SystemExit(f"train_demo: {out} exists; expected a directory to create")
    return read_corpus([data / "tokens.npz"], CONFIG)


def record(config: TrainingConfig, settings: RunSettings) -> dict[str, Any]:
    """Returns the settings and the machine of a training, as training.json has them."""
    return {
        "steps": config.steps,
        "batch": settings.batch,
        "length": settings.length,
        "seed": settings.seed,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": sys.version.split()[0],
    }


def train(data: Path, out: Path, steps: int, batch: int, length: int, seed: int) -> None:
    corpus = read(data, out)
    config = TrainingConfig(
        steps=steps,
        learning_rate=3e-3,
        final_learning_rate=1e-4,
        decay_start=0.0,
        decay_end=1.0,
        final_mtp_weight=0.3,
        balance_weight=0.0,
        bias_update_end=1.0,
    )
    settings = RunSettings(
        batch=batch, length=length, seed=seed, log_every=100, eval_every=1000, eval_batches=0
    )
    model = DeepSeekV3(CONFIG, rngs=nnx.Rngs(seed))
    run = out.with_name(out.name + ".run")
    trained = training_run.train(model, corpus, run, config, settings, report=print_entry)
    write_checkpoint(trained.model, out, quantization=BlockQuantization())
    for name in ("tokenizer.json", "tokenizer_config.json", "corpus.json"):
        shutil.copy(data / name, out / name)
    published, _ = load(out, dtype=jnp.float32)
    result = {
        **record(config, settings),
        "train_tokens": len(corpus.train),
        "held_out_tokens": len(corpus.held_out),
        "held_out_float8": evaluate(published, corpus, config, settings),
        "rows": trained.metrics,
    }
    write_json(out / "training.json", result)
    print(json.dumps(result["held_out_float8"]))
    draw_run(run)
    shutil.copy(run / "loss.png", out / "loss.png")


def train_drafts(
    data: Path, checkpoint: Path, out: Path, steps: int, batch: int, length: int, seed: int
) -> None:
    corpus = read(data, out)
    config = TrainingConfig(
        steps=steps,
        learning_rate=1e-3,
        final_learning_rate=2e-5,
        warmup_steps=steps // 20,
        decay_start=0.0,
        decay_end=1.0,
        weight_decay=0.0,
        draft_depth=DRAFTS,
    )
    settings = RunSettings(
        batch=batch, length=length, seed=seed, log_every=50, eval_every=0, eval_batches=0
    )
    model, _ = load(checkpoint, dtype=jnp.float32)
    before = evaluate(model, corpus, config, settings)
    run = out.with_name(out.name + ".run")
    trained = training_run.train(model, corpus, run, config, settings, report=print_entry)
    write_checkpoint(trained.model, out, quantization=BlockQuantization())
    copy_frozen(checkpoint, out)
    for name in ("tokenizer.json", "tokenizer_config.json", "corpus.json", "loss.png"):
        shutil.copy(checkpoint / name, out / name)
    published, _ = load(out, dtype=jnp.float32)
    result = json.loads((checkpoint / "training.json").read_text("utf-8"))
    result["drafts"] = {
        "depth": DRAFTS,
        **record(config, settings),
        "held_out_before": before,
        "held_out_float8": evaluate(published, corpus, config, settings),
        "metrics": trained.metrics,
    }
    write_json(out / "training.json", result)
    print(json.dumps([before, result["drafts"]["held_out_float8"]]))


def copy_frozen(before: Path, after: Path) -> None:
    """Replaces all tensors outside of the MTP layer by those of ``before``, because quantizing
    weights again can round their scales differently."""
    (old_file,), (new_file,) = (list(path.glob("*.safetensors")) for path in (before, after))
    old, new = SafetensorsFile(old_file), SafetensorsFile(new_file)
    assert old.keys() == new.keys(), "the checkpoints have different tensors"
    prefix = f"model.layers.{CONFIG.num_hidden_layers}."
    tensors = {name: (new if name.startswith(prefix) else old)[name][...] for name in new}
    with atomic_file(new_file) as file:
        write_file(Path(file.name), tensors)


def print_entry(entry: Entry) -> None:
    print(json.dumps(entry), flush=True)


def write_json(path: Path, content: object) -> None:
    atomic_write(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo checkpoint.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("prepare", help="tokenizer and token arrays")
    command.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")))
    command.add_argument("--out", type=Path, required=True)
    command = commands.add_parser("train", help="train and write the checkpoint")
    command.set_defaults(steps=2800)
    drafts = commands.add_parser("drafts", help="train the MTP layer of a checkpoint to draft")
    drafts.add_argument("--checkpoint", type=Path, required=True)
    drafts.set_defaults(steps=1000)
    for each in (command, drafts):
        each.add_argument("--data", type=Path, required=True)
        each.add_argument("--out", type=Path, required=True)
        each.add_argument("--steps", type=int)
        each.add_argument("--batch", type=int, default=32)
        each.add_argument("--length", type=int, default=1024)
        each.add_argument("--seed", type=int, default=0)
    arguments = vars(parser.parse_args())
    commands = {"prepare": prepare, "train": train, "drafts": train_drafts}
    run = commands[arguments.pop("command")]
    run(**arguments)


if __name__ == "__main__":
    main()
