"""The tables of docs/, made from the result files."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import read_gbs

RESULTS = Path(__file__).parent / "results"


def read(name: str) -> dict[str, Any]:
    """Reads a result file: ``date``, ``machine``, ``versions``, ``rows``."""
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Formats a Markdown table. A heading that begins with ``>`` is right-aligned."""
    rule = ["---:" if name.startswith(">") else "---" for name in header]
    lines = [[name.removeprefix(">") for name in header], rule, *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def timed(names: Iterable[str], phase: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (result name, row) of a phase, without rows of errors or synthetic drafts."""
    for name in names:
        for row in read(name)["rows"]:
            if row.get("phase") == phase and row.get("acceptance") is None:
                yield name, row


def share(part: float | None) -> str:
    return "" if part is None else f"{part:.0%}"


def share_of_peak(result: dict[str, Any], row: dict[str, Any]) -> str:
    """Returns the share of the peak bandwidth, which is the same number for all results of one kind
    of GPU. It is empty if there is none."""
    peak = read_gbs(result["machine"])
    if peak is None or "floor_fraction" not in row:
        return ""
    return share(row["floor_fraction"] * result["read_gbs"] / peak)


def dated_link(name: str) -> str:
    return f"[{read(name)['date']}](../benchmarks/results/{name}.json)"


# ---- kernels -------------------------------------------------------------------------------------


def _kernel(row: dict[str, Any]) -> list[object]:
    peer, us = row.get("peer") or "none", row["us"]
    ratio = f"{row['ratio']:.2f}" if row["ratio"] else row.get("no_ratio", "")
    peer_cells = ["", ""] if peer == "none" else [f"{row['peer_us']:,.4g}", ratio]
    name = [f"`{row['op']}`", row["dtype"], row["shape"]]
    timed = ["", ""] if us is None else [f"{us:,.4g}", share(row["roof_fraction"])]
    return [*name, *timed, peer, *peer_cells]


_KERNEL = (
    "operation",
    "dtype",
    "shape",
    ">us",
    ">% of roofline",
    "best peer",
    ">peer us",
    ">ratio",
)


def kernel_rows() -> list[dict[str, Any]]:
    """Returns the rows of the kernel benchmark, grouped by operation and dtype."""
    rows = read("kernels_h200")["rows"]
    kinds = list(dict.fromkeys(map(kind, sorted(rows, key=lambda row: row["op"]))))
    return sorted(rows, key=lambda row: kinds.index(kind(row)))


def kind(row: dict[str, Any]) -> tuple[str, str]:
    return row["op"], row["dtype"]


def kernels() -> str:
    return markdown(_KERNEL, map(_kernel, kernel_rows()))


def kernels_by_kind() -> str:
    """Summarises the ratios of all shapes of :func:`kernels`, by operation and dtype."""
    rows = kernel_rows()
    header = ("operation", "dtype", ">shapes", ">with a ratio", "best peers")
    lines: list[list[object]] = []
    for op, dtype in dict.fromkeys(map(kind, rows)):
        of_kind = [row for row in rows if kind(row) == (op, dtype)]
        ratios = sorted(row["ratio"] for row in of_kind if row["ratio"])
        peers = sorted({re.split("[ ,]", row["peer"])[0] for row in of_kind if row.get("peer")})
        spread = [ratios[0], statistics.median(ratios), ratios[-1]] if ratios else []
        cells = [f"{ratio:.2f}" for ratio in spread] or ["", "", ""]
        names = ", ".join(peers) or "none"
        lines.append([f"`{op}`", dtype, len(of_kind), len(ratios), names, *cells])
    return markdown([*header, ">lowest ratio", ">median", ">highest"], lines)


# ---- whole models --------------------------------------------------------------------------------


_DECODE = (
    "decode_moonlight_h200_2",
    "decode_moonlight_fp8_h200",
    "decode_moonlight_int4_h200",
    "decode_moonlight_h200_3",
    "decode_moonlight_few_h200",
    "decode_moonlight_whole_layer_bf16_h200",
    "decode_moonlight_whole_layer_fp8_h200",
    "decode_moonlight_whole_layer_int4_h200_2",
    "decode_v3_h200_2",
    "decode_v3_many_h200",
    "decode_v3_h200_3",
    "decode_v3_mtp_h200_2",
    "decode_v3_mtp_h200_3",
    "decode_v2_h200",
    "decode_v2_kernels_h200",
    "decode_v2_h200_3",
)
_SPARSE = ("decode_v32_h200_2", "decode_v32_h200_3")
_DENSE = ("decode_v32_dense_h200", "decode_v32_dense_h200_2", "decode_v32_dense_h200_3")
"""Slices of V3.2. Where results have the same case, the table shows the last one's."""
_TWO_GPUS = (
    "decode_v3_two_gpus_all_gather_h200",
    "decode_v3_two_gpus_all_gather_many_h200",
    "decode_v3_two_gpus_all_to_all_h200",
    "decode_v3_two_gpus_one_sided_h200",
    "decode_v3_two_gpus_micro_batches_h200",
    "decode_v3_two_gpus_prefill_h200",
)
_PREFILL = ("prefill_moonlight_h200", "prefill_moonlight_h200_2", "prefill_v3_h200")
_OLD_FORM = "expanded"  # of results before 2026-11-27, which do not name it


def decode() -> str:
    """Shows the last result of each case.

    Where a result compares forms of a layer, the fastest is shown, which is what a model chooses.
    "whole_layer" is a form that no longer exists.
    """
    header = (
        "model",
        "weights",
        ">batch",
        ">context",
        ">ms/step",
        ">tokens/s",
        ">% of peak bandwidth",
    )
    last: dict[tuple[Any, ...], tuple[str, dict[str, Any]]] = {}
    for name, r in timed(_DECODE, "decode"):
        case = r["model"], r["dtype"], r["batch"], r["context"]
        before, shown = last.get(case, ("", {}))
        exists = r.get("feed_forward") != "whole_layer"
        if exists and not (before == name and shown["ms"] <= r["ms"]):
            last[case] = name, r
    models = list(dict.fromkeys(model for model, *_ in last))
    weights = list(dict.fromkeys(dtype for _, dtype, *_ in last))
    order = sorted(last, key=lambda case: (models.index(case[0]), weights.index(case[1]), case[2:]))
    rows = (
        [model, dtype, batch, f"{context:,}", f"{r['ms']:.2f}", f"{r['tokens_per_s']:,.0f}",
         share_of_peak(read(name), r), dated_link(name)]
        for model, dtype, batch, context in order
        for name, r in [last[model, dtype, batch, context]]
    )  # fmt: skip
    return markdown([*header, "result"], rows)


def vllm() -> str:
    """Compares decode steps with vLLM."""
    header = ("model", "weights", ">batch", ">ms/step", ">vLLM, ms/step", ">speedup")
    rows = (
        [r["model"], r["dtype"], r["batch"], f"{r['ms']:.2f}", f"{r['vllm_ms']:.2f}",
         f"{r['vllm_ms'] / r['ms']:.2f}"]
        for r in read("vllm_h200")["rows"]
        if r["phase"] == "decode"
    )  # fmt: skip
    return markdown(header, rows)


def sparse_slice() -> str:
    """Compares the sparse and the dense slice of V3.2, by number of sequences and cached tokens."""
    sparse, dense = (
        {(r["batch"], r["context"]): (name, r) for name, r in timed(names, "decode")}
        for names in (_SPARSE, _DENSE)
    )
    header = (
        ">sequences",
        ">cached tokens each",
        ">dense, ms/step",
        ">sparse, ms/step",
        ">speedup",
    )
    more = (">dense, % of peak bandwidth", ">sparse", "results")
    rows = (
        [batch, f"{context:,}", f"{of_dense['ms']:.2f}", f"{of_sparse['ms']:.2f}",
         f"{of_dense['ms'] / of_sparse['ms']:.2f}",
         share_of_peak(read(dense_name), of_dense),
         share_of_peak(read(sparse_name), of_sparse),
         f"{dated_link(dense_name)}, {dated_link(sparse_name)}"]
        for batch, context in sorted(sparse.keys() & dense.keys())
        for dense_name, of_dense in [dense[batch, context]]
        for sparse_name, of_sparse in [sparse[batch, context]]
    )  # fmt: skip
    return markdown([*header, *more], rows)


def prefill() -> str:
    header = ("model", "weights", ">prompts", ">tokens each", "form", ">ms", ">tokens/s")
    rows = (
        [r["model"], r["dtype"], r["batch"], f"{r['context']:,}",
         r.get("chunk_form", _OLD_FORM),
         f"{r['ms']:.1f}", f"{r['tokens_per_s']:,.0f}", dated_link(name)]
        for name, r in timed(_PREFILL, "prefill")
    )  # fmt: skip
    return markdown([*header, "result"], rows)


def two_gpus() -> str:
    header = ("phase", ">layers", "exchange", ">micro-batches", ">batch", ">tokens", ">ms")
    rows = (
        [phase, r["layers"], r["exchange"], r["micro_batches"], r["batch"], f"{r['context']:,}",
         f"{r['ms']:.2f}", f"{r['tokens_per_s']:,.0f}",
         share_of_peak(read(name), r), dated_link(name)]
        for phase in ("decode", "prefill")
        for name, r in timed(_TWO_GPUS, phase)
    )  # fmt: skip
    return markdown([*header, ">tokens/s", ">% of peak bandwidth", "result"], rows)


_SPECULATION = (
    "drafts",
    ">batch",
    ">temperature",
    ">depth",
    ">tokens/s",
    ">tokens per step",
    ">first draft accepted",
    ">relative step cost",
    ">speedup",
)


def _speculation_row(r: dict[str, Any]) -> list[Any]:
    return [
        r["draft"] or "none", r["batch"], f"{r['temperature']:g}", r["depth"],
        f"{r['tokens_per_s']:,.0f}", f"{r['accept_length']:.2f}",
        share(r["acceptance"][0] if r["acceptance"] else None), f"{r['step_cost']:.2f}",
        f"{r['speed_up']:.2f}",
    ]  # fmt: skip


def speculation() -> str:
    return markdown(_SPECULATION, map(_speculation_row, read("speculation_h200")["rows"]))


def speculation_one() -> str:
    """Shows one sequence of two models."""
    rows = (
        [model, *_speculation_row(r)]
        for model, name in (
            ("346 M", "speculation_one_h100"),
            ("demo, 10 M", "speculation_demo_one_h100"),
        )
        for r in read(name)["rows"]
    )
    return markdown(["model", *_SPECULATION], rows)


def quantization() -> str:
    header = ("model", "format", ">KL, nats", ">top-1 agreement", ">loss, nats", ">bytes")
    rows = (
        [model, r["form"], f"{r['kl']:.5f}", f"{r['top1_agreement']:.1%}", f"{r['loss']:.4f}",
         f"{r['weight_bytes']:,}"]
        for model, name in (("346 M", "quantization_large"), ("demo", "quantization_demo"))
        for r in read(name)["rows"]
    )  # fmt: skip
    return markdown(header, rows)


def activations() -> str:
    header = ("format", ">KL, nats", ">top-1 agreement", ">loss, nats")
    rows = (
        [r["form"], f"{r['kl']:.5f}", f"{r['top1_agreement']:.1%}", f"{r['loss']:.4f}"]
        for r in read("activations_demo")["rows"]
    )
    return markdown(header, rows)


def cpu() -> str:
    header = (">batch", ">dsv3_jax, tokens/s", ">transformers, tokens/s", ">ratio")
    rows = (
        [r["batch"], f"{r['dsv3_jax_tokens_per_s']:.0f}", f"{r['transformers_tokens_per_s']:.0f}",
         f"{r['ratio']:.1f}"]
        for r in read("cpu_decode")["rows"]
    )  # fmt: skip
    return markdown(header, rows)
