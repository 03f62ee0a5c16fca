"""Compares the two candidate inputs of the MTP layer: hidden states after or before the final norm.

    python scripts/bench_mtp_hidden.py --tokens runs/demo/tokens.npz --out OUT.json \\
        demo post=runs/post/model pre=runs/pre/model

Drafts on held-out text with both, whichever a model was trained with, and measures the acceptance.
``post`` and ``pre`` are training runs that differ only in ``dsv3 train --mtp-hidden``. ``demo`` is
the checkpoint in the package, trained with the state after the norm.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np

import dsv3_jax
from dsv3_jax.config import MTPHidden
from dsv3_jax.files import atomic_write
from dsv3_jax.generation.drafters import MTPDrafter

PROMPTS, LENGTH, NEW = 32, 128, 128


def measure(model: dsv3_jax.DeepSeekV3, prompts: list[list[int]]) -> list[dict[str, Any]]:
    rows = []
    generator = dsv3_jax.Generator(model, None, 320, batch_sizes=(PROMPTS,))
    for hidden in get_args(MTPHidden):
        for temperature in (0.0, 1.0):
            out = generator.generate(
                prompts,
                max_new_tokens=NEW,
                ignore_eos=True,
                temperature=temperature,
                seed=range(PROMPTS),
                draft=MTPDrafter(hidden),
                draft_depth=3,
            )
            drafts = out.stats.speculation
            assert drafts is not None
            rows.append(
                {
                    "fed": hidden,
                    "temperature": temperature,
                    "acceptance": [round(a, 4) for a in drafts.acceptance],
                    "accept_length": round(drafts.accept_length, 4),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Acceptance by the MTP layer's input.")
    parser.add_argument("models", nargs="+", help="demo, or NAME=DIR")
    parser.add_argument("--tokens", type=Path, required=True, help=".npz with `held_out`")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    held_out = np.load(arguments.tokens)["held_out"]
    starts = np.linspace(0, len(held_out) - LENGTH, PROMPTS, endpoint=False, dtype=int)
    prompts = [held_out[start : start + LENGTH].tolist() for start in starts]
    rows = []
    for entry in arguments.models:
        name, _, path = entry.partition("=")
        model, _ = dsv3_jax.load(path or name, dtype="float32")
        for row in measure(model, prompts):
            rows.append({"model": name, **row})
            print(rows[-1], flush=True)
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": jax.devices()[0].device_kind,
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "prompts": PROMPTS,
        "prompt_tokens": LENGTH,
        "new_tokens": NEW,
        "rows": rows,
    }
    atomic_write(arguments.out, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
