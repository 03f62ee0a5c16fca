"""Tables of accuracy, of conversion and of the demo on a CPU."""

from __future__ import annotations

from benchmarks.tables import results


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


def cache_dtype() -> str:
    header = ("cache", ">KL, nats", ">top-1 agreement", ">loss, nats", ">bytes per token")
    rows = (
        [r["form"], f"{r['kl']:.5f}", f"{r['top1_agreement']:.1%}", f"{r['loss']:.4f}",
         f"{r['bytes_per_token']:,}"]
        for r in results.read("cache_dtype_demo")["rows"]
    )  # fmt: skip
    return results.markdown(header, rows)


def conversion() -> str:
    header = ("command", ">seconds", ">speed relative to cp -r", ">written, GB", ">peak memory, GB")
    rows = (
        [f"`{r['what']}`" if r["what"] == "cp -r" else f"`dsv3 convert --to {r['what']}`",
         f"{r['seconds']:.1f}", f"{r['ratio_to_cp']:.2f}", f"{r['bytes_written'] / 1e9:.1f}",
         f"{r['peak_bytes'] / 1e9:.2f}"]
        for r in results.read("convert_cpu")["rows"]
    )  # fmt: skip
    return results.markdown(header, rows)


def cpu() -> str:
    header = (">batch", ">dsv3_jax, tokens/s", ">transformers, tokens/s", ">ratio")
    rows = (
        [r["batch"], f"{r['dsv3_jax_tokens_per_s']:.0f}", f"{r['transformers_tokens_per_s']:.0f}",
         f"{r['ratio']:.1f}"]
        for r in results.read("cpu_decode")["rows"]
    )  # fmt: skip
    return results.markdown(header, rows)
