"""What the flags of ``dsv3 train`` mean that are fields of RunSettings and TrainingConfig."""

RUN = {
    "batch": "windows a step",
    "length": "tokens a window",
    "seed": "of the initial weights and the order of the data",
    "log_every": "steps between rows of metrics.jsonl",
    "eval_every": "steps between evaluations on held-out text; 0: first and last",
    "eval_batches": "batches an evaluation takes at most; 0 takes all",
    "save_every": "steps between checkpoints; 0: at the end",
    "keep": "checkpoints kept; 0 writes none, and the run cannot be resumed",
    "max_minutes": "stop then: evaluate, save and write the model, which takes its own time",
}

TRAINING = {
    "steps": "length of the whole run, which the schedules refer to; more extend a run",
    "learning_rate": "the largest",
    "final_learning_rate": "where the cosine ends",
    "warmup_steps": "of linear rise",
    "decay_start": "fraction of the steps at which the cosine begins",
    "decay_end": "fraction of the steps at which it ends",
    "betas": "AdamW's decay rates of its two moments",
    "weight_decay": "AdamW's; norms are exempt",
    "clip_norm": "largest norm of the gradient",
    "mtp_weight": "of the MTP loss at first",
    "final_mtp_weight": "of the MTP loss in the end",
    "mtp_weight_switch": "fraction of the steps at which the MTP loss's weight changes",
    "mtp_hidden": "the hidden state that MTP layers are fed",
    "balance_weight": "of the sequence-wise balance loss",
    "bias_update_speed": "step of the routers' biases",
    "bias_update_end": "fraction of the steps after which the biases stay",
    "compute_dtype": "bfloat16 or float32; weights and moments are kept in float32",
    "accumulate": "parts of a batch that are computed one after the other",
    "remat": "compute layers again in the backward pass, for memory",
    "scan_layers": "compile equal layers once",
    "lora_rank": "train low-rank updates of frozen weights; 0 trains the weights",
    "lora_alpha": "the updates' factor, times the rank",
    "lora_seed": "of the updates",
}

LEARNING_RATE = 3e-4

# Where the command has a default and the dataclass has none, or another.
DEFAULTS = {
    "steps": "none; needed",
    "learning_rate": f"{LEARNING_RATE:g}",
    "final_learning_rate": "a tenth of the learning rate",
    "warmup_steps": "200, or a tenth of the steps if that is less",
}
