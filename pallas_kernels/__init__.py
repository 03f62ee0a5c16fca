"""Array operations of DeepSeek models. They know neither a model nor a mesh.

Each operation is a package with the same files: ``api.py`` has the public function and its
dispatch, ``reference.py`` is the specification in plain jax.numpy and runs everywhere, and each
platform with a faster implementation has a file of its own.
"""

from pallas_kernels.attention_inputs.api import attention_inputs
from pallas_kernels.block_quant.api import block_dequant, block_quant, integer_quant
from pallas_kernels.cross_entropy.api import cross_entropy
from pallas_kernels.decoder_layer.api import feed_forward
from pallas_kernels.gather_rows.api import gather_rows
from pallas_kernels.grouped_matmul.api import grouped_matmul
from pallas_kernels.grouped_swiglu.api import grouped_swiglu
from pallas_kernels.hopper.split_kv import whole_sequences as mla_decode_whole_sequences
from pallas_kernels.mla_decode.api import mla_decode, mla_decode_parts, page_width
from pallas_kernels.mla_decode.float8_cache import (
    dequantize_latent,
    float8_token_bytes,
    quantize_latent,
)
from pallas_kernels.mla_decode.mosaic_gpu import make_schedule as mla_decode_schedule
from pallas_kernels.mla_prefill.api import mla_prefill
from pallas_kernels.quantized_matmul.api import quantized_matmul
from pallas_kernels.rms_norm.api import add_rms_norm, rms_norm
from pallas_kernels.route.api import route
from pallas_kernels.route.reference import Routes, sort_pairs
from pallas_kernels.softmax import merge_attention
from pallas_kernels.sparse_index.api import sparse_index
from pallas_kernels.sparse_mla_decode.api import sparse_mla_decode, sparse_mla_prefill
from pallas_kernels.swiglu.api import swiglu
from pallas_kernels.token_exchange.api import token_exchange
from pallas_kernels.top_k.api import top_k

__all__ = [
    "Routes",
    "add_rms_norm",
    "attention_inputs",
    "block_dequant",
    "block_quant",
    "cross_entropy",
    "dequantize_latent",
    "feed_forward",
    "float8_token_bytes",
    "gather_rows",
    "grouped_matmul",
    "grouped_swiglu",
    "integer_quant",
    "merge_attention",
    "mla_decode",
    "mla_decode_parts",
    "mla_decode_schedule",
    "mla_decode_whole_sequences",
    "mla_prefill",
    "page_width",
    "quantize_latent",
    "quantized_matmul",
    "rms_norm",
    "route",
    "sort_pairs",
    "sparse_index",
    "sparse_mla_decode",
    "sparse_mla_prefill",
    "swiglu",
    "token_exchange",
    "top_k",
]
