"""Tables of whole models: steps, prefill, speculation, quantization and the demo on a CPU."""

from __future__ import annotations

from typing import Any

from benchmarks.tables import results

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
    for name, r in results.timed(_DECODE, "decode"):
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
         results.share_of_peak(results.read(name), r), results.dated_link(name)]
        for model, dtype, batch, context in order
        for name, r in [last[model, dtype, batch, context]]
    )  # fmt: skip
    return results.markdown([*header, "result"], rows)


def sparse_slice() -> str:
    """Compares the sparse and the dense slice of V3.2, by number of sequences and cached tokens."""
    sparse, dense = (
        {(r["batch"], r["context"]): (name, r) for name, r in results.timed(names, "decode")}
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
         results.share_of_peak(results.read(dense_name), of_dense),
         results.share_of_peak(results.read(sparse_name), of_sparse),
         f"{results.dated_link(dense_name)}, {results.dated_link(sparse_name)}"]
        for batch, context in sorted(sparse.keys() & dense.keys())
        for dense_name, of_dense in [dense[batch, context]]
        for sparse_name, of_sparse in [sparse[batch, context]]
    )  # fmt: skip
    return results.markdown([*header, *more], rows)


def prefill() -> str:
    header = ("model", "weights", ">prompts", ">tokens each", "form", ">ms", ">tokens/s")
    rows = (
        [r["model"], r["dtype"], r["batch"], f"{r['context']:,}",
         r.get("chunk_form", _OLD_FORM),
         f"{r['ms']:.1f}", f"{r['tokens_per_s']:,.0f}", results.dated_link(name)]
        for name, r in results.timed(_PREFILL, "prefill")
    )  # fmt: skip
    return results.markdown([*header, "result"], rows)


def two_gpus() -> str:
    header = ("phase", ">layers", "exchange", ">micro-batches", ">batch", ">tokens", ">ms")
    rows = (
        [phase, r["layers"], r["exchange"], r["micro_batches"], r["batch"], f"{r['context']:,}",
         f"{r['ms']:.2f}", f"{r['tokens_per_s']:,.0f}",
         results.share_of_peak(results.read(name), r), results.dated_link(name)]
        for phase in ("decode", "prefill")
        for name, r in results.timed(_TWO_GPUS, phase)
    )  # fmt: skip
    return results.markdown([*header, ">tokens/s", ">% of peak bandwidth", "result"], rows)


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
        results.share(r["acceptance"][0] if r["acceptance"] else None), f"{r['step_cost']:.2f}",
        f"{r['speed_up']:.2f}",
    ]  # fmt: skip


def speculation() -> str:
    return results.markdown(
        _SPECULATION, map(_speculation_row, results.read("speculation_h200")["rows"])
    )


def speculation_one() -> str:
    """Shows one sequence of two models."""
    rows = (
        [model, *_speculation_row(r)]
        for model, name in (
            ("346 M", "speculation_one_h100"),
            ("demo, 10 M", "speculation_demo_one_h100"),
        )
        for r in results.read(name)["rows"]
    )
    return results.markdown(["model", *_SPECULATION], rows)


def quantization() -> str:
    header = ("model", "format", ">KL, nats", ">top-1 agreement", ">loss, nats", ">bytes")
    rows = (
        [model, r["form"], f"{r['kl']:.5f}", f"{r['top1_agreement']:.1%}", f"{r['loss']:.4f}",
         f"{r['weight_bytes']:,}"]
        for model, name in (("346 M", "quantization_large"), ("demo", "quantization_demo"))
        for r in results.read(name)["rows"]
    )  # fmt: skip
    return results.markdown(header, rows)


def activations() -> str:
    header = ("format", ">KL, nats", ">top-1 agreement", ">loss, nats")
    rows = (
        [r["form"], f"{r['kl']:.5f}", f"{r['top1_agreement']:.1%}", f"{r['loss']:.4f}"]
        for r in results.read("activations_demo")["rows"]
    )
    return results.markdown(header, rows)


def cpu() -> str:
    header = (">batch", ">dsv3_jax, tokens/s", ">transformers, tokens/s", ">ratio")
    rows = (
        [r["batch"], f"{r['dsv3_jax_tokens_per_s']:.0f}", f"{r['transformers_tokens_per_s']:.0f}",
         f"{r['ratio']:.1f}"]
        for r in results.read("cpu_decode")["rows"]
    )  # fmt: skip
    return results.markdown(header, rows)
