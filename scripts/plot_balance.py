"""Plots the expert load of two training runs, with and without bias balancing.

    python scripts/plot_balance.py --with-bias runs/with/metrics.jsonl \\
        --without-bias runs/without/metrics.jsonl --out benchmarks/results/balance/load.png

The second run was trained with ``dsv3 train --bias-update-speed 0 --balance-weight 0``; otherwise
the runs are equal.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from dsv3_jax.training.metrics_log import read_metrics
from dsv3_jax.viz.balance import balance
from dsv3_jax.viz.canvas import save


def main() -> None:
    parser = argparse.ArgumentParser(description="Expert load with and without bias balancing.")
    parser.add_argument("--with-bias", type=Path, required=True)
    parser.add_argument("--without-bias", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    runs = {}
    for label, path in (
        ("bias balancing", arguments.with_bias),
        ("without balancing", arguments.without_bias),
    ):
        entries = [entry for entry in read_metrics(path) if "expert_load" in entry]
        loads = np.array([entry["expert_load"] for entry in entries], float)
        runs[label] = np.array([entry["step"] for entry in entries], float), loads
        print(f"{label}: last step, largest over mean load by layer {np.round(loads[-1], 2)}")
    save(balance(runs), arguments.out)


if __name__ == "__main__":
    main()
