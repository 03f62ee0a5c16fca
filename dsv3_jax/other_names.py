"""Names that other projects have for settings of this one, for hints in error messages.

vLLM, SGLang, transformers and llama.cpp call the same settings differently. Flags of the ``dsv3``
command and arguments in Python get their hints from here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Ours, with the names of others. Where two of ours fit, the first that the command has is meant.
_NAMES = {
    "max_len": (
        *("max_model_len", "context_length", "max_seq_len", "max_seq_length", "max_length"),
        *("max_context_len", "ctx_size", "n_ctx"),
    ),
    "max_new_tokens": (
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "max_gen_len", "n_predict"),
        "max_length",
    ),
    "max_running": ("max_num_seqs", "max_running_requests", "max_batch_size", "parallel"),
    "max_waiting": ("max_queued_requests",),
    "cache_tokens": (
        *("gpu_memory_utilization", "mem_fraction_static", "max_total_tokens"),
        *("num_gpu_blocks_override", "kv_cache_memory_bytes"),
    ),
    "cache_dtype": ("kv_cache_dtype",),
    "host_cache_gib": ("swap_space", "cpu_offload_gb", "kv_offloading_size", "hicache_size"),
    "layout": (
        *("tensor_parallel_size", "tp_size", "tp", "data_parallel_size", "dp_size", "dp"),
        *("expert_parallel_size", "ep_size", "ep", "enable_expert_parallel", "enable_dp_attention"),
        *("pipeline_parallel_size", "pp_size", "pp", "decode_context_parallel_size", "dcp_size"),
    ),
    "draft": ("speculative_config", "speculative_algorithm", "speculative_model"),
    "draft_depth": (
        *("num_speculative_tokens", "speculative_num_steps", "speculative_num_draft_tokens"),
    ),
    "served_name": ("served_model_name", "alias"),
    "model": ("model_path", "model_name", "hf_path"),
    "api_key_file": ("api_key",),
    "log_level": (
        *("uvicorn_log_level", "disable_log_requests", "disable_log_stats", "log_requests"),
        *("disable_uvicorn_access_log", "enable_log_requests"),
    ),
    "compile_cache": ("compilation_cache_dir", "download_dir"),
    "distributed": ("nnodes", "node_rank", "dist_init_addr"),
    "num_requests": ("num_prompts",),
    "rate": ("request_rate",),
    "concurrency": ("max_concurrency",),
    "input_len": ("random_input_len", "random_input"),
    "output_len": ("random_output_len", "random_output"),
    "trace": ("dataset_name",),
    "url": ("base_url",),
    "stop": ("stop_strings", "stop_sequences"),
    "stop_tokens": ("stop_token_ids", "eos_token_id"),
    "n": ("num_return_sequences", "best_of"),
    "banned_tokens": ("bad_words_ids", "suppress_tokens"),
    "allowed_tokens": ("allowed_token_ids",),
    "min_tokens": ("min_new_tokens", "min_length"),
    "batch_sizes": ("batch_size",),
    "prefix_cache": ("enable_prefix_caching",),
    "dtype": ("torch_dtype",),
    "path_or_name": ("model_id", "pretrained_model_name_or_path"),
    "context": ("max_len", "max_model_len", "context_length", "max_seq_len"),
    "batch": ("max_running", "max_num_seqs", "max_running_requests", "batch_size"),
}

# Names of others for what this project does not let anybody choose, and why.
_NOTES = {
    "trust_remote_code": "not needed, because no code of a checkpoint runs",
    "enable_prefix_caching": "not needed, because prefixes are always cached",
    "enable_chunked_prefill": "not needed, because prompts are always prefilled in chunks",
    "reasoning_parser": "not needed, because the chat format determines it",
    "tool_call_parser": "not needed, because the chat format determines it",
    "enable_auto_tool_choice": "not needed, because the chat format determines it",
    "enforce_eager": "not a choice, because every step is a compiled program",
    "disable_cuda_graph": "not a choice, because every step is a compiled program",
    "max_num_batched_tokens": "not a choice; --target-tpot-ms bounds what a step prefills",
    "chunked_prefill_size": "not a choice; --target-tpot-ms bounds what a step prefills",
    "do_sample": "not needed, because a temperature of 0 is greedy, and others sample",
}


def hint(name: str, known: Collection[str]) -> str:
    """Returns what to say about a name that there is not, such as ``"; did you mean max_len?"``, or
    ``""`` if no other project is known to have it. ``known`` has the names that there are, like
    ``name`` those of flags with their hyphens, or of arguments."""
    bare = name.lstrip("-").replace("-", "_").lower()
    is_flag = name.startswith("-")
    for ours, others in _NAMES.items():
        shown = "--" + ours.replace("_", "-") if is_flag else ours
        if bare in others and shown in known:
            about = ", which shards the model over all devices" if ours == "layout" else ""
            return f"; did you mean {shown}{about}?"
    return f"; it is {_NOTES[bare]}" if bare in _NOTES else ""


def hints(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function so that the error about an argument that it does not have names the one
    that was meant."""
    known = inspect.signature(function).parameters.keys()

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        check_arguments(kwargs, known)
        return function(*args, **kwargs)

    return checked


def check_arguments(names: Iterable[str], known: Collection[str]) -> None:
    """Raises TypeError for a name of an argument that is not known, with a hint."""
    for name in names:
        if name not in known:
            raise TypeError(f"unexpected keyword argument {name!r}{hint(name, known)}")
