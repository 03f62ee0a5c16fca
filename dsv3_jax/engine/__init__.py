"""The serving engine: continuous batching, chunked prefill, a prefix cache, speculation.

In the order a request moves through it:

==================== ======================================================================
request.py           the handle that the caller holds
intake.py            what callers ask for, checked
scheduler.py         what the next step computes: queue, admission, plan; pure Python
scheduler_shard.py   slots and pages of a data-parallel shard, its choice; pure Python
page_allocator.py    cache pages and the prefix index; pure Python
step_plan.py         requests, limits and plans as the scheduler passes them on
buckets.py           the sizes that programs are compiled for
cache_size.py        the number of pages that fit on the devices
pool_layout.py       division of the pages over shards and devices
swap_space.py        host memory for preempted requests in deterministic mode; pure Python
sla_controller.py    limits of the scheduler that keep latencies; pure Python
step_times.py        how long dispatches take, decode steps per dispatch; pure Python
step_options.py      options of a step that decide which program runs
step_input.py        what the host sends to the device for one step
state.py             the device's state: page pool and request slots
state_sharding.py    shardings of that state
slot_rows.py         access to the slots on a mesh that shards the batch
step.py              the compiled step
programs.py          one compiled program for each bucket of sizes
model_arrays.py      a model as a flat list of arrays, the programs' argument
program_store.py     compiled programs in a directory, for later processes
page_swap.py         copies of pages and slots between the device and the host
stored_pages.py      pages that are loaded from the store, or saved to it; pure Python
page_packing.py      copies of pages between the pool and records that leave the engine
page_transfer.py     the store of pages: tiers of dsv3_jax.pages, and threads that move pages
executor.py          dispatch of plans, and their results
launcher.py          the thread that launches programs on the state
step_results.py      results of a dispatch, request by request
dispatch_times.py    times of dispatches, and those in which none is in flight
processes.py         an engine on a mesh of several processes: one leads, the others follow
grammar.py           which tokens of a request may come next, decided on the host
prompt_logprobs.py   log-probabilities of prompt tokens
output.py            tokens, text and log-probabilities on the host
open_requests.py     the requests that are not at their end
step_loop.py         its turns: plan, dispatch, read
loop.py              their callers, and the thread that runs them
fair_lock.py         a lock that the loop cannot keep from others
errors.py            errors of an engine
checks.py            checks of the model and of settings that contradict each other
engine.py            the public class: it builds the parts and reads settings
expert_rebalancer.py placement of experts by their loads while requests run
stats.py             figures of a running engine
timeline.py          samples of these figures over time
==================== ======================================================================
"""

from dsv3_jax.engine.device.processes import Follower, Leader
from dsv3_jax.engine.engine import Engine
from dsv3_jax.engine.requests.grammar import Grammar
from dsv3_jax.engine.requests.request import EngineRequest
from dsv3_jax.engine.scheduling.scheduler import QueueFullError
from dsv3_jax.engine.scheduling.sla_controller import LatencyTargets
from dsv3_jax.engine.stats import EngineStats
from dsv3_jax.generation.errors import EngineError, RequestError
from dsv3_jax.pages import CacheTiers

__all__ = [
    "CacheTiers",
    "Engine",
    "EngineError",
    "EngineRequest",
    "EngineStats",
    "Follower",
    "Grammar",
    "LatencyTargets",
    "Leader",
    "QueueFullError",
    "RequestError",
]
