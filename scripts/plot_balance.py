"""Expert load of two runs, one with bias balancing and one without, in one picture.

    python scripts/plot_balance.py --with-bias runs/with/metrics.jsonl \\
        --without-bias runs/without/metrics.jsonl --out benchmarks/results/balance/load.png

The runs differ in ``dsv3 train --bias-update-speed 0 --balance-weight 0`` alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from dsv3_jax.training.journal import read_rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Expert load with and without bias balancing.")
    parser.add_argument("--with-bias", type=Path, required=True)
    parser.add_argument("--without-bias", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for label, path, color in (
        ("without balancing", arguments.without_bias, "tab:red"),
        ("bias balancing", arguments.with_bias, "tab:blue"),
    ):
        rows = [row for row in read_rows(path) if "expert_load" in row]
        steps = [row["step"] for row in rows]
        loads = np.array([row["expert_load"] for row in rows])
        axes.plot(steps, loads, color=color, lw=0.6, alpha=0.4)
        axes.plot(steps, loads.mean(axis=1), color=color, label=label)
        print(f"{label}: last step, largest over mean load by layer {np.round(loads[-1], 2)}")
    axes.set(xlabel="step", ylabel="largest load / mean load", title="MoE layers, and their mean")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(arguments.out, dpi=110)


if __name__ == "__main__":
    main()
