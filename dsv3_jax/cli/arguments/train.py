"""Arguments of ``dsv3 train``."""

from __future__ import annotations

import argparse

from dsv3_jax.cli import flags
from dsv3_jax.cli.arguments import shared
from dsv3_jax.cli.arguments.parser import Flags
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.settings import RunSettings

SUMMARY = "Train a model from scratch, or continue from a checkpoint."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments to the subcommand's parser."""
    add = Flags(parser)
    source = Flags(parser.add_mutually_exclusive_group())
    source.text("--config", "config.json of a new model with random weights", metavar="JSON")
    source.text(
        "--from",
        "model to train further: demo, a Hugging Face directory, a store or a name on the Hub",
        dest="source",
        metavar="MODEL",
    )
    add.text(
        "--data",
        "text files, glob patterns or directories; or an .npz or .npy file of token ids",
        nargs="+",
        metavar="PATH",
    )
    add.text(
        "--tokenizer",
        "tokenizer.json or its directory (default: the model's, or the one next to --data)",
        metavar="PATH",
    )
    add.path("--out", "new directory for the run", required=True, metavar="DIR")
    add.switch(
        "--resume",
        "continue the run in --out with its recorded settings; only --steps may be raised",
    )
    shared.add_layout(add)
    shared.add_distributed(add)
    add.integer(
        "--expert-devices",
        "with --layout train: number of devices that share the experts (default: all devices)",
    )
    add.integer(
        "--context-devices",
        "with --layout train: number of devices that share each sequence (default: 1)",
    )
    add.choice(
        "--to",
        "format of the trained model's weights in OUT/model (default: bf16)",
        choices=["bf16", "fp8", "float32"],
    )
    add.text(
        "--track",
        "also send the metrics to Weights & Biases, or write files for TensorBoard (default of DIR:"
        " OUT/tensorboard)",
        metavar="wandb[:PROJECT] | tensorboard[:DIR]",
    )
    add.switch("--plot", "also plot OUT/loss.png and OUT/expert_load.png")
    shared.add_json(add)
    shared.add_compile_cache(add)
    flags.add_fields(parser, "run", RunSettings, RUN_HELP, {})
    flags.add_fields(parser, "training", TrainingConfig, TRAINING_HELP, DEFAULTS)


RUN_HELP = {
    "batch": "sequences per step",
    "length": "tokens per sequence",
    "seed": "seed of the initial weights and of the order of the data",
    "log_every": "steps between two entries of metrics.jsonl",
    "eval_every": "steps between two evaluations on held-out text; 0: only at start and end",
    "eval_batches": "largest number of batches in an evaluation; 0: all",
    "save_every": "steps between two checkpoints; 0: only at the end",
    "keep": "number of checkpoints to keep; 0: none are written, and the run cannot be resumed",
    "max_minutes": "stop after this many minutes; evaluating, saving and writing the model come on"
    " top",
    "check_memory": "refuse a run whose step needs more memory than the devices have",
}

TRAINING_HELP = {
    "steps": "length of the whole run, for the schedules too; a resumed run can be given more",
    "learning_rate": "peak learning rate",
    "final_learning_rate": "learning rate at the end of the cosine",
    "warmup_steps": "steps in which the learning rate rises linearly to its peak",
    "decay_start": "fraction of the steps at which the cosine begins",
    "decay_end": "fraction of the steps at which the cosine ends",
    "optimizer": "optimizer of matrices; with muon, embedding, head and norms still have adamw",
    "betas": "decay rates of AdamW's two moments",
    "moments_dtype": "float32 or bfloat16, of the optimizer's moments between steps",
    "weight_decay": "weight decay, which excludes norms",
    "clip_norm": "largest norm of the gradient; a longer one is scaled down",
    "qk_clip": "largest score of an attention head, above which its weights are scaled; 0: any",
    "mtp_weight": "weight of the MTP loss at the start",
    "final_mtp_weight": "weight of the MTP loss at the end",
    "mtp_weight_switch": "fraction of the steps at which the weight of the MTP loss changes",
    "mtp_hidden": "hidden state of the main model that is the input of the MTP layers",
    "balance_weight": "weight of the sequence-wise balance loss",
    "bias_update_speed": "change of the routers' biases per step",
    "bias_update_end": "fraction of the steps after which the biases no longer change",
    "document_mask": "a token attends to its own document only, not to those before it",
    "compute_dtype": "bfloat16 or float32, of most matmuls; master weights are always float32",
    "accumulate": "number of parts of a batch that are computed one after the other",
    "remat": "what the backward pass computes again, to save memory; without a value: full; auto:"
    " the least with which a step fits",
    "scan_layers": "compile equal layers once, as a loop",
    "indexer_stage": "of a model with sparse attention: dense trains its indexers, sparse all",
    "draft_depth": "train the MTP layer alone, to draft this many tokens in turn; 0: train all",
    "lora_rank": "train low-rank updates of frozen weights; 0: train the weights themselves",
    "lora_alpha": "the low-rank updates are multiplied by this value, divided by their rank",
    "lora_seed": "seed of the initial low-rank updates",
}

LEARNING_RATE = 3e-4
"""Default of ``--learning-rate``."""

DEFAULTS = {
    "steps": "none, required",
    "learning_rate": f"{LEARNING_RATE:g}",
    "final_learning_rate": "a tenth of the learning rate",
    "warmup_steps": "200, or a tenth of the steps if that is fewer",
}
"""Defaults to show in the help, where the command's differs from the dataclass's."""
