"""The serving engine: continuous batching, chunked prefill, a prefix cache, speculation.

In the order a request moves through it:

- ``engine.py`` is the public class; it reads ``settings.py`` and builds the parts.
- ``requests/``: ``intake`` checks what callers ask for; ``request`` is the handle that they hold.
- ``loop.py`` takes requests and runs the turns of ``step_loop.py``: plan, dispatch, read.
- ``scheduling/`` (no JAX): ``scheduler`` plans a step from the ``scheduler_shard`` of each part of
  the batch, with ``page_allocator`` and ``stored_pages``; ``step_sizes`` sets its limits.
  ``step_plan`` has the request and the plan that all rooms share.
- ``device/``: ``executor`` fills a ``step_input`` of one of the ``buckets`` and launches one of the
  ``programs`` (stored in ``program_store``), which runs ``step`` on the ``state``, and reads
  the results. ``page_pool`` sizes the cache, ``page_packing`` and ``page_transfer`` copy its
  pages, ``model_arrays`` has the weights, ``processes`` spans hosts.
- ``requests/``: ``delivery`` hands results to ``grammar`` and, in a thread, to ``output``: text.
- ``stats.py`` has figures; ``expert_rebalancer.py`` moves experts while the engine serves.
"""

from dsv3_jax.engine.device.processes import Follower, Leader
from dsv3_jax.engine.engine import Engine
from dsv3_jax.engine.requests.grammar import Grammar
from dsv3_jax.engine.requests.request import EngineRequest
from dsv3_jax.engine.scheduling.scheduler import QueueFullError
from dsv3_jax.engine.scheduling.step_sizes import LatencyTargets
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
