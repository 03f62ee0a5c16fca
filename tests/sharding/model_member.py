"""One process of a run: ``model_member.py ACTION DIRECTORY OUT SIZES``, under launch_local.

DIRECTORY has a checkpoint, OUT receives each process's results, SIZES are the mesh's axes in JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

import dsv3_jax
from dsv3_jax.generation import drafters
from dsv3_jax.generation.depth import DepthChooser
from sharding import make_mesh
from sharding.distributed import host_values, initialize

PROMPTS = [[3, 9, 27, 81], [5, 25, 125], [7]]
TOKENS = np.random.default_rng(0).integers(0, 160, (2, 7), np.int32)


def model(directory: str, out: str, sizes: str) -> None:
    """Writes logits and greedy completions of the checkpoint, sharded over all processes."""
    network, generator = loaded(directory, sizes)
    np.save(f"{out}/logits{jax.process_index()}.npy", host_values(logits(network)))
    write(out, greedy=completions(generator))


def reads(directory: str, out: str, sizes: str) -> None:
    """Writes completions of a sharded batch, and the measurements that choose draft depths."""
    _, generator = loaded(directory, sizes)
    sharded = completions(generator)
    drafters.AUTO_DEPTHS = (0, 1)  # two programs to compile instead of four
    observed, observe = [], DepthChooser.observe

    def watched(self, depth, drafted, accepted, steps, seconds):
        observed.append((depth, seconds))
        observe(self, depth, drafted, accepted, steps, seconds)

    DepthChooser.observe = watched
    for _ in range(3):
        auto = completions(generator, draft="ngram", draft_depth="auto")
    write(out, sharded=sharded, auto=auto, observed=observed)


def loaded(directory: str, sizes: str) -> tuple[dsv3_jax.DeepSeekV3, dsv3_jax.Generator]:
    initialize(timeout_s=60)
    network, _ = dsv3_jax.load(directory, mesh=make_mesh(**json.loads(sizes)))
    generator = dsv3_jax.Generator(network, None, 32, batch_sizes=(4,), prefill_chunk=4)
    return network, generator


def write(out: str, **values: Any) -> None:
    Path(out, f"result{jax.process_index()}.json").write_text(json.dumps(values))


def logits(network: dsv3_jax.DeepSeekV3) -> jax.Array:
    graph, state = nnx.split(network)
    return jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))(state, TOKENS)


def completions(generator, **settings) -> list:
    """Returns the tokens, the best alternatives to each, and the finish reason."""
    generation = generator.generate(PROMPTS, max_new_tokens=10, logprobs=2, **settings)
    return [[c.tokens, [t for t, _ in c.top_logprobs[0]], c.finish_reason] for c in generation]


if __name__ == "__main__":
    {"model": model, "reads": reads}[sys.argv[1]](*sys.argv[2:])
