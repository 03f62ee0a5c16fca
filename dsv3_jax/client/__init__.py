"""Clients of a server: requests of a trace, sent and measured over HTTP.

In the order a measurement moves through it:

=============== ========================================================================
workload.py     the prompts and output lengths of a trace, fitted to the served model
completions.py  one streamed request to /v1/completions, and the times of its chunks
load.py         arrival of requests: Poisson arrivals, or a number of them at a time
results.py      throughput and latencies, with the field names of ``vllm bench serve``
chat.py         a conversation with /v1/chat/completions, without other packages
=============== ========================================================================
"""
