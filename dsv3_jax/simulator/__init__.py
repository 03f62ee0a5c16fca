"""Simulates engines and clusters under load: the engine's own scheduler under simulated time.

================== ====================================================================
workload.py        requests: traces, Poisson arrivals, shares of prompts on disk
step_work.py       what a planned step computes
step_times.py      time of a step by the planner's roofline
efficiency.py      shares of the peak rates that programs reach, read from measurements
measured_times.py  time of a step by a measured table of programs
replica.py         one engine: scheduler, controller, a device that only takes time
cluster.py         pools of replicas, routing, and what travels between them
deployed.py        pools from deployments of the planner
measured_run.py    an engine and its replays from a result of ``scripts/bench_engine.py``
report.py          throughput, latencies, service levels, and what limits them
================== ====================================================================

Nothing here runs JAX while it simulates. Units are seconds, tokens and bytes.
"""
