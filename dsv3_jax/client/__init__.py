"""Clients of a server: requests of a trace, sent and measured over HTTP.

In the order a measurement moves through it:

=============== ========================================================================
workload.py     the requests of a trace, fitted to the served model; arrivals at a rate or N at a
                time; throughput and latencies, with the names of ``vllm bench serve``
completions.py  one streamed request to /v1/completions, and the times of its chunks
chat.py         a conversation with /v1/chat/completions, without other packages
=============== ========================================================================
"""
