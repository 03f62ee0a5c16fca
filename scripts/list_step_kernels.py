"""Lists the kernels behind the LM head of a decode step, compiled for a GPU without the GPU.

    python -m scripts.list_step_kernels [--layers 2] [--batch 1] [--sampling greedy sampled]
        [--drafter mtp --depth 1] [--feed-forward mosaic_gpu] [--all]

needs JAX's CUDA plugin and ptxas. A kernel's number is that of the kernels from the LM head to it,
one after the other; those of a longest such chain are marked. ``--all`` lists all kernels of a step
and counts from its start. scripts/profile_step.py has the times
of kernels of the same names, if the GPU's program is of the same commit and version of XLA.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any, get_args

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks.decode import models, steps
from benchmarks.profile.chain import last_loop
from dsv3_jax.cli import allocator
from dsv3_jax.engine.device.step_input import StepOptions
from dsv3_jax.generation.drafters import DraftPlan
from dsv3_jax.generation.sampling import SamplingMode
from dsv3_jax.plan.target import Target
from dsv3_jax.plan.topology import topology

CACHED = 1024
LM_HEAD = "gemm_fusion_dot"  # the last one of a step


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="List the kernels behind the LM head.")
    parser.add_argument("--model", default="moonlight-16b", help=models.HELP)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--weights", default="bf16", choices=models.WEIGHTS)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sampling", nargs="+", default=["greedy"], choices=get_args(SamplingMode))
    parser.add_argument("--drafter", choices=("mtp", "ngram"))
    parser.add_argument("--depth", type=int, default=1, help="drafts per step")
    parser.add_argument("--feed-forward", choices=models.FEED_FORWARD, help="form of all layers")
    parser.add_argument("--all", action="store_true", help="list all kernels of a step")
    parser.add_argument("--target", default="h200")
    return parser.parse_args(words)


def compiled(arguments: argparse.Namespace, sampling: SamplingMode) -> str:
    """Returns the optimised HLO of a program of decode steps."""
    devices = np.array(topology(Target.parse(arguments.target))[:1])
    mesh = Mesh(devices, ("device",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec())

    def on_target(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    config = dataclasses.replace(models.config(arguments.model), num_hidden_layers=arguments.layers)
    # The functions that choose kernels read the device from the mesh.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        drafts = DraftPlan.read(arguments.drafter, arguments.depth, config)
        depth = drafts.max_depth
        has_mtp = arguments.drafter == "mtp"
        model = models.shapes(config, arguments.weights, "bfloat16", mtp=has_mtp)
        graph, weights = nnx.split(model)
        model = nnx.merge(graph, jax.tree.map(on_target, weights))
        model.use_feed_forward(arguments.feed_forward)
        longest = CACHED + 1 + steps.LONG * (depth + 1)
        slots = steps.Slots(model, arguments.batch, longest, drafts.drafter, depth)
        programs = slots.programs
        programs.use([on_target(leaf) for leaf in programs.leaves])
        options = StepOptions(sampling)
        shape = programs.shape(arguments.batch, 0, options)
        leaves, structure = programs.state_shapes(slots.num_pages)
        lowered = programs.lower([on_target(leaf) for leaf in leaves], structure, shape)
        return programs.compile(lowered, shape).as_text() or ""


def main() -> None:
    allocator.configure("generate")  # as a command that runs a model
    arguments = parse()
    # It cannot load a program whose device is missing.
    jax.config.update("jax_enable_compilation_cache", False)
    for sampling in arguments.sampling:
        loop = last_loop(compiled(arguments, sampling), None if arguments.all else LM_HEAD)
        longest = loop.longest()
        behind = "" if arguments.all else f"{len(loop.kernels)} behind the LM head, "
        print(
            f"{sampling}: {loop.body} kernels in a step, {loop.condition} in the loop's condition;"
            f" {behind}{len(longest)} one after the other"
        )
        for kernel in loop.kernels:
            print(f"  {kernel.depth:2} {'*' if kernel.name in longest else ' '} {kernel.name}")


if __name__ == "__main__":
    main()
