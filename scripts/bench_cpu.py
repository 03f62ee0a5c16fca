"""Compares the demo checkpoint's decode speed on a CPU with transformers.

    python scripts/bench_cpu.py [--out benchmarks/results/cpu_decode.json]

Both decode greedily in float32 with the same dequantized weights and the same prompts. After a
warm-up the generated tokens are compared. A result is the median of several complete generations,
including prefill; runs of the two alternate. Requires the parity extra.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import torch
import transformers

import dsv3_jax
from dsv3_jax.checkpoint.parameters import published_tensors
from dsv3_jax.checkpoint.reader import write_file
from dsv3_jax.files import atomic_write

PROMPTS = [
    "def read_config(path):\n    ",
    "class TestQueue(unittest.TestCase):\n",
    "import os\nimport sys\n",
    "    def __repr__(self):\n        ",
    "for line in lines:\n    ",
    "    try:\n        value = self",
    "def main(argv=None):\n    parser",
    "    with self.assertRaises(",
]
LENGTH = 24  # prompt tokens; equal, because transformers pads ragged batches


def transformers_model(model: dsv3_jax.DeepSeekV3) -> transformers.PreTrainedModel:
    """Loads our float32 weights into transformers' own class, from a directory as users do."""
    with tempfile.TemporaryDirectory() as directory:
        write_file(Path(directory) / "model.safetensors", published_tensors(model))
        config = model.config.to_hf() | {"torch_dtype": "float32"}
        config.pop("quantization_config", None)
        (Path(directory) / "config.json").write_text(json.dumps(config))
        return transformers.AutoModelForCausalLM.from_pretrained(directory).eval()


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def compare(batch: int, new_tokens: int, repeats: int) -> dict[str, float | int | bool]:
    model, tokenizer = dsv3_jax.load("demo", dtype=jnp.float32, mtp=False)
    assert tokenizer is not None
    prompts = [(tokenizer.encode(p) * LENGTH)[:LENGTH] for p in PROMPTS[:batch]]
    generator = dsv3_jax.Generator(model, tokenizer, max_len=512)
    theirs = transformers_model(model)
    ids = torch.tensor(prompts)

    def run_ours() -> list[list[int]]:
        out = generator.generate(prompts, max_new_tokens=new_tokens, ignore_eos=True)
        return [completion.tokens for completion in out]

    def run_theirs() -> list[list[int]]:
        with torch.no_grad():
            out = theirs.generate(  # pyright: ignore[reportCallIssue]
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=2,
            )
        return out[:, LENGTH:].tolist()

    same = run_ours() == run_theirs()
    times = [(seconds(run_ours), seconds(run_theirs)) for _ in range(repeats)]
    ours, others = (statistics.median(column) for column in zip(*times, strict=True))
    total = batch * new_tokens
    return {
        "batch": batch,
        "new_tokens": new_tokens,
        "same_tokens": same,
        "dsv3_jax_tokens_per_s": round(total / ours, 1),
        "transformers_tokens_per_s": round(total / others, 1),
        "ratio": round(others / ours, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Compare the demo's decode speed with transformers."
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu_decode.json"))
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    rows = [compare(batch, arguments.new_tokens, arguments.repeats) for batch in (1, 8)]
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}, {jax.devices()[0].platform}",
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "rows": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(arguments.out, json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
