"""Simulates engines and clusters under load: the engine's own loop under simulated time.

=============== ===========================================================
workload.py     requests: traces, Poisson arrivals, shares of prompts on disk
step_times.py   what a step computes, and its time by the planner's roofline
replica.py      one engine: its loop and scheduler, a device that only takes time
cluster.py      pools of replicas, routing, and what travels between them
deployed.py     pools from deployments of the planner
measured_run.py an engine and its replays from a result of ``scripts/bench_engine.py``
report.py       throughput, latencies, service levels, and what limits them
scaling.py      nodes over a day
=============== ===========================================================

Nothing here runs JAX while it simulates. Units are seconds, tokens and bytes.
"""
