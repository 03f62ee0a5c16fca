"""Simulates DeepSeek-V3 on 16 to 320 H800 under the load of DeepSeek's own service.

    python -m scripts.simulate_published --out benchmarks/results/simulated_h800.json
    python -m scripts.simulate_published --read benchmarks/results/simulated_h800.json \\
        --page docs/planning.md --picture docs/day_and_night.png

The first command simulates, the second one writes the tables between their marks in the page and
draws the picture. DeepSeek's figures are of 24 hours (V3/R1 inference system overview, 2025-03-01);
:data:`ASSUMPTIONS` lists what they leave open.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.decode import models
from dsv3_jax import presets
from dsv3_jax.files import atomic_write
from dsv3_jax.plan.deployment import Deployment, EngineSettings
from dsv3_jax.plan.target import Target
from dsv3_jax.plan.weights import ShardCache
from dsv3_jax.simulator.cluster import Cluster, ClusterSettings
from dsv3_jax.simulator.deployed import PoolPlan
from dsv3_jax.simulator.report import ServiceLevel, summary
from dsv3_jax.simulator.scaling import Hour, Unit, day_curve, depth_of, scale
from dsv3_jax.simulator.step_times import Efficiency, StepModel, measured
from dsv3_jax.simulator.workload import Lengths, poisson
from dsv3_jax.viz.canvas import save
from dsv3_jax.viz.scaling import scaled_day
from scripts.marked_text import replace_between

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"

INPUT_TOKENS, STORED_TOKENS, OUTPUT_TOKENS = 608e9, 342e9, 168e9  # in 24 hours
MEAN_NODES, PEAK_NODES = 226.75, 278
NODE_INPUT, NODE_OUTPUT = 73_700, 14_800  # tokens/s of a node of prefill and of decode
USER_SPEED = 21.0  # tokens/s; 20 to 22
PREFILL_NODES, DECODE_NODES = 4, 18  # of a unit
DAY = 86_400

# Lengths: the ratio of input to output tokens and the mean cache of 4,989 tokens per output token.
# With independent log-normal lengths, that mean is P + O exp(sigma^2) / 2.
SIGMA = 1.0
MEAN_OUTPUT = 4989 / (INPUT_TOKENS / OUTPUT_TOKENS + 2.718281828**SIGMA**2 / 2)
MEAN_PROMPT = MEAN_OUTPUT * INPUT_TOKENS / OUTPUT_TOKENS
LONGEST_PROMPT, LONGEST_OUTPUT = 24_000, 8_000
HIT_SHARE = STORED_TOKENS / INPUT_TOKENS

CACHE_BYTES = 70_272  # of a token
TRANSFER_BYTES_PER_S = 0.85 * 50e9
DISK_BYTES_PER_S = 40 * 2**30

LEVEL = ServiceLevel(ttft=5.0, tpot=0.05)
ENOUGH = 0.9
"""Share of requests that meet the targets, up to which load is raised."""
SLOTS = 128  # for each GPU
MULTI_STEP = 16

ASSUMPTIONS = (
    f"Prompts and outputs are log-normal with sigma {SIGMA:g}, means {MEAN_PROMPT:,.0f} and"
    f" {MEAN_OUTPUT:,.0f} tokens, at most {LONGEST_PROMPT:,} and {LONGEST_OUTPUT:,}. The means"
    " follow from the daily totals and the published mean cache of 4,989 tokens per output token.",
    "Arrivals are Poisson at the published mean load per node, 8.6 requests/s.",
    f"{HIT_SHARE:.1%} of each prompt, in whole pages of 64 tokens, come from disk at"
    " 40 GiB/s per request; loading delays a request, and takes no time of a step.",
    "A token's cache of 70,272 bytes (bfloat16) is sent from prefill to decode at 85 % of one"
    " 50 GB/s adapter.",
    "Weights are float8, dispatched tokens float8, and results bfloat16. All experts are equally"
    " likely, so that devices of a unit have equal work in the experts.",
    "Sending overlaps with computing, as DeepSeek's two micro-batches do. The network reaches 85 %"
    " of its peak between nodes, an assumption near what DeepEP reports.",
    "Memory, arithmetic and the time of a pass reach what our kernels reached on one H200 for a"
    " slice of V3 (decode_v3_h200_2, decode_v3_many_h200, prefill_v3_h200). H800 and H200 have the"
    " same arithmetic. The time of a pass grows with the number of layers.",
    "No MTP drafts. DeepSeek does not say whether its figures have them.",
    "A step of a prefill unit takes up to 4 chunks of 512 tokens on each GPU, one of a unified"
    " replica two. Chunks expand earlier keys again. Decode has 128 slots per GPU.",
    "Decode dispatches 16 steps at a time in the simulator, so that a request waits up to 0.4 s"
    " longer for its decode slot than it would.",
)


@dataclasses.dataclass(frozen=True)
class Size:
    """A cluster of H800."""

    devices: int
    prefill_units: int = 0
    """Units of 32 GPUs; the rest are decode units. 0 for one unified replica."""
    decode_units: int = 1
    """Units of 144 GPUs, if there are units."""

    @property
    def nodes(self) -> int:
        return self.devices // 8


SIZES = (
    *(Size(16), Size(32), Size(64), Size(128)),
    *(Size(176, 1), Size(272, 4), Size(304, 5), Size(320, 1, 2)),
)


def slice_efficiency() -> Efficiency:
    """Returns what our kernels reached on one H200 for a slice of V3, for all of V3's layers."""
    config = models.config("v3-slice")
    deployment = Deployment(
        config, Target.parse("h200"), "single", 1, 4096, quantization="fp8", activations="float8"
    )
    model = StepModel(ShardCache().of(deployment), deployment)
    reached = measured(
        model,
        _rows("decode_v3_h200_2") + _rows("decode_v3_many_h200"),
        _rows("prefill_v3_h200"),
    )
    layers = presets.DEEPSEEK_V3.num_hidden_layers / config.num_hidden_layers
    return dataclasses.replace(reached, network=0.85, pass_seconds=layers * reached.pass_seconds)


def _rows(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))["rows"]


def cluster(size: Size, efficiency: Efficiency, shards: ShardCache) -> ClusterSettings:
    """Returns the pools of a cluster."""

    def pool(
        devices: int, layout: str, replicas: int, slots: int, chunks: int, **settings: Any
    ) -> Any:
        resumes = settings.get("resumes", False)
        cache = None if slots == SLOTS else 262_144 * devices
        deployment = Deployment(
            presets.DEEPSEEK_V3,
            Target.parse(f"h800x{devices}"),
            layout,
            slots * devices,
            LONGEST_PROMPT + LONGEST_OUTPUT,
            quantization="fp8",
            activations="float8",
            exchange="ragged_all_to_all",
            float8_dispatch=True,
            redundant_experts=0 if layout == "dp_attention_ep" else 32,
            prefill_chunk=512,
            engine=EngineSettings(cache, chunks=chunks),
        )
        plan = PoolPlan(
            deployment,
            replicas,
            efficiency,
            bfloat16_results=True,
            stored_prompts=not resumes,
            multi_step=MULTI_STEP if resumes else None,
            **settings,
        )
        return plan.settings(shards)

    if not size.prefill_units:
        return ClusterSettings(
            pool(size.devices, "dp_attention_ep", 1, SLOTS, chunks=2),
            disk_seconds_per_token=CACHE_BYTES / DISK_BYTES_PER_S,
        )
    return ClusterSettings(
        pool(144, "deepseek_decode_ep144", size.decode_units, SLOTS, chunks=1, resumes=True),
        pool(32, "deepseek_prefill_ep32", size.prefill_units, 64, chunks=4),
        CACHE_BYTES / TRANSFER_BYTES_PER_S,
        CACHE_BYTES / DISK_BYTES_PER_S,
    )


def simulate(
    settings: ClusterSettings, rate: float, seconds: float, warm_up: float
) -> dict[str, Any]:
    """Returns the figures at a load of ``rate`` requests per second."""
    arrivals = poisson(
        lambda now: rate,
        rate,
        warm_up + seconds,
        Lengths(MEAN_PROMPT, SIGMA, LONGEST_PROMPT),
        Lengths(MEAN_OUTPUT, SIGMA, LONGEST_OUTPUT),
        hit_share=HIT_SHARE,
    )
    began = time.process_time()
    outcome = Cluster(settings).run(arrivals, until=warm_up + seconds, warm_up=warm_up)
    figures = summary(outcome, LEVEL)
    figures |= {"rate": round(rate, 3), "cpu_seconds": round(time.process_time() - began, 1)}
    return figures


def mean_rate(nodes: int) -> float:
    """Returns the published mean load of N nodes, in requests per second."""
    return OUTPUT_TOKENS / DAY / MEAN_OUTPUT / MEAN_NODES * nodes


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Simulates all sizes and returns the result."""
    shards, reached = ShardCache(), slice_efficiency()
    rows = []
    for size in SIZES:
        if arguments.devices and size.devices not in arguments.devices:
            continue
        for load in arguments.loads:
            figures = simulate(
                cluster(size, reached, shards),
                load * mean_rate(size.nodes),
                arguments.seconds,
                arguments.warm_up,
            )
            row = {
                **dataclasses.asdict(size),
                "load": load,
                "warm_up": arguments.warm_up,
                **figures,
            }
            print(json.dumps(row), file=sys.stderr, flush=True)
            rows.append(row)
            if figures["attainment"]["both"] < ENOUGH:
                break  # more load would miss more
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, one core",
        "efficiency": dataclasses.asdict(reached),
        "targets_ms": {"ttft": 5000, "tpot": 50},
        "assumptions": ASSUMPTIONS,
        "rows": rows,
    }


def merged(path: Path, result: dict[str, Any]) -> dict[str, Any]:
    """Returns a result with the commands of the file before it, and with the rows of other sizes
    that it has, the smallest size first."""
    before = json.loads(path.read_text("utf-8")) if path.exists() else {"rows": [], "commands": []}
    sizes = {row["devices"] for row in result["rows"]}
    rows = [row for row in before["rows"] if row["devices"] not in sizes] + result["rows"]
    return {
        **result,
        "commands": before["commands"] + result["commands"],
        "rows": sorted(rows, key=lambda row: (row["devices"], row["load"])),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Formats the table of all sizes. The first row is DeepSeek's."""
    lines = [
        "| H800 | load | input, output tokens/s per node | prefill, decode node |"
        " TTFT p50, p99, s | tokens/s per user | in time | limit |",
        "|---|---:|---|---|---|---:|---:|---|",
        f"| DeepSeek, mean of {MEAN_NODES} nodes | 1 | 31,030, 8,570 |"
        f" {NODE_INPUT:,}, {NODE_OUTPUT:,} | - | 20 to 22 | - | - |",
    ]
    for row in rows:
        pools, nodes = row["pools"], row["nodes"]
        per_node = row["prompt_tokens_per_second"] / nodes, row["output_tokens_per_second"] / nodes
        by_pool = "-"
        if "prefill" in pools:
            a = pools["prefill"]["prompt_tokens_per_second_per_node"]
            b = pools["decode"]["output_tokens_per_second_per_node"]
            by_pool = f"{a:,.0f}, {b:,.0f}"
        kind = "unified"
        if row["prefill_units"]:
            decode = "144" if _decode_units(row) == 1 else f"{_decode_units(row)} x 144"
            kind = f"{row['prefill_units']} x 32 + {decode}"
        ttft, tpot = row["ttft_ms"], row["tpot_ms"]
        lines.append(
            f"| {row['devices']} ({kind}) | {row['load']:g} |"
            f" {per_node[0]:,.0f}, {per_node[1]:,.0f} | {by_pool} |"
            f" {_seconds(ttft, 'p50')}, {_seconds(ttft, 'p99')} |"
            f" {1e3 / tpot['p50'] if tpot else 0:.0f} | {row['attainment']['both']:.0%} |"
            f" {row['limit']} |"
        )
    return "\n".join(lines)


def _decode_units(row: Mapping[str, Any]) -> int:
    """Returns the decode units of a row. Rows of earlier runs have one and do not say so."""
    return row.get("decode_units", 1)


def _seconds(percentiles: Mapping[str, float], name: str) -> str:
    return f"{percentiles[name] / 1e3:.2f}" if percentiles else "-"


def days(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Hour]]:
    """Returns a scaled day with the published capacity of a unit, and with the simulated one."""
    curve = day_curve(depth_of(MEAN_NODES / PEAK_NODES))
    peak = OUTPUT_TOKENS / DAY / MEAN_OUTPUT / (sum(curve) / len(curve))
    load = [peak * share for share in curve]
    published = (
        Unit(PREFILL_NODES, PREFILL_NODES * NODE_INPUT / MEAN_PROMPT),
        Unit(DECODE_NODES, DECODE_NODES * NODE_OUTPUT / MEAN_OUTPUT),
    )
    result = {"published capacity": scale(load, published)}
    in_time = [row for row in rows if row["prefill_units"] and row["attainment"]["both"] >= ENOUGH]
    if in_time:
        best = max(in_time, key=lambda row: row["rate"] / row["nodes"])
        simulated = (
            Unit(PREFILL_NODES, best["rate"] / best["prefill_units"]),
            Unit(DECODE_NODES, best["rate"] / _decode_units(best)),
        )
        result["simulated capacity"] = scale(load, simulated)
    return result


def day_table(scaled: Mapping[str, Sequence[Hour]]) -> str:
    """Formats the mean and the peak of nodes."""
    lines = [
        "| a day with | mean nodes | peak nodes | fewest nodes |",
        "|---|---:|---:|---:|",
        f"| DeepSeek, published | {MEAN_NODES} | {PEAK_NODES} | - |",
    ]
    for name, hours in scaled.items():
        nodes = [hour.nodes for hour in hours]
        lines.append(f"| {name} | {sum(nodes) / len(nodes):.1f} | {max(nodes)} | {min(nodes)} |")
    return "\n".join(lines)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Simulate DeepSeek-V3 on H800.")
    parser.add_argument("--seconds", type=float, default=40, help="simulated seconds measured")
    parser.add_argument("--warm-up", type=float, default=40, help="simulated seconds before them")
    parser.add_argument("--devices", type=int, nargs="+", help="sizes; default all")
    parser.add_argument(
        "--loads",
        type=float,
        nargs="+",
        default=[0.1, 0.25, 0.75, 1.0],
        help="shares of the published load, ascending; each size ends with the first that misses",
    )
    parser.add_argument("--out", type=Path, help="result; rows of other sizes in it stay")
    parser.add_argument("--read", type=Path, help="formats this result instead of simulating")
    parser.add_argument("--page", type=Path, help="Markdown file with the tables")
    parser.add_argument("--picture", type=Path, help="picture of a day")
    arguments = parser.parse_args(words)
    read = arguments.read
    result = json.loads(read.read_text("utf-8")) if read else run(arguments)
    if not read:
        result["commands"] = [f"python -m scripts.simulate_published {' '.join(words)}"]
    if arguments.out:
        result = merged(arguments.out, result)
        atomic_write(arguments.out, json.dumps(result, indent=1) + "\n")
    scaled = days(result["rows"])
    if arguments.page:
        replace_between(arguments.page, "h800", table(result["rows"]))
        replace_between(
            arguments.page, "assumptions", "\n".join(f"- {each}" for each in result["assumptions"])
        )
        replace_between(arguments.page, "day", day_table(scaled))
    if arguments.picture:
        save(scaled_day(scaled, MEAN_NODES, PEAK_NODES), arguments.picture)
    print(table(result["rows"]), day_table(scaled), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
