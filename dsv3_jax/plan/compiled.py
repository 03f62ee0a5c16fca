"""The generator's own programs compiled for devices that are not here, and what they take there."""

from __future__ import annotations

import dataclasses
import re
import time
from collections import Counter
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx

from dsv3_jax.generation.drafters import MTPDrafter
from dsv3_jax.generation.programs import Program, Programs
from dsv3_jax.generation.sampling import Sampling
from dsv3_jax.kv_cache import PAGE_SIZE
from dsv3_jax.layers.on_mesh import shardings
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.topology import topology
from dsv3_jax.plan.weights import Shapes
from sharding import Layout, make_layout

Phase = Literal["decode", "prefill"]

_KERNEL = re.compile(r'%([\w-]+?)(?:\.\d+)? = .*custom_call_target="(?:tpu_custom_call|mosaic_gpu)')
_UNNAMED = "mpmd_map"  # what Mosaic GPU's calls are called, all of them


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program, in bytes of one device."""

    arguments: int
    """Weights and state, read or not, as the compiler lays them out."""
    workspace: int
    """Temporary arrays, and results that do not overwrite the state."""
    kernels: dict[str, int]
    """Calls of Pallas kernels in the program, by name; ``mosaic_gpu`` are those of GPUs."""
    seconds: float
    """To lower and compile."""

    @property
    def peak(self) -> int:
        return self.arguments + self.workspace


def compile_program(deployment: Deployment, phase: Phase) -> Compiled:
    """A decode step, or a prefill chunk of all rows, with every layer of the model.

    Raises:
      ValueError: the compiler for the target is not installed; or the program does not fit, in the
        compiler's words.
    """
    layout = make_layout(
        deployment.layout_name,
        devices=topology(deployment.target),
        exchange=deployment.exchange,
        float8_dispatch=deployment.float8_dispatch,
    )
    # XLA's own parts are traced for the devices of the mesh too.
    with jax.sharding.use_abstract_mesh(layout.mesh.abstract_mesh):
        return _compiled(deployment, layout, phase)


def _compiled(deployment: Deployment, layout: Layout, phase: Phase) -> Compiled:
    began = time.perf_counter()
    programs = _programs(deployment, layout)
    program = getattr(programs, phase)
    held, structure = programs.state_shapes(
        deployment.batch, depth=deployment.depth, mtp=deployment.mtp
    )
    drafter = MTPDrafter() if deployment.mtp else None
    arguments, static = (np.int32(1),), (drafter,)
    if phase == "decode":
        arguments = Sampling.greedy(deployment.batch), np.int32(1)
        static = (drafter, deployment.depth)
    lowered = program.lower(held, structure, *arguments, static=static, keep_unused=True)
    executable = _compile(lowered, program, deployment)
    memory: Any = executable.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Compiled(
        arguments=memory.argument_size_in_bytes,
        workspace=memory.temp_size_in_bytes + results,
        kernels=_kernels(executable.as_text() or ""),
        seconds=time.perf_counter() - began,
    )


def _programs(deployment: Deployment, layout: Layout) -> Programs:
    """Of shapes that lie where the arrays would."""
    model = Shapes.of(
        deployment.config,
        deployment.quantization,
        mtp=deployment.mtp,
        redundant_experts=deployment.redundant_experts,
    ).model
    if deployment.activations:
        model.use_float8_activations()
    model.lay_out(layout)
    lies = shardings(model, layout)
    graph, state = nnx.split(model)
    placed = [
        (path, leaf.replace(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=lies[path])))
        for path, leaf in nnx.to_flat_state(state)
    ]
    model = nnx.merge(graph, nnx.from_flat_state(placed))
    max_len = -(-(deployment.context + 1) // PAGE_SIZE) * PAGE_SIZE
    return Programs.of(
        model,
        max_len,
        prefill_chunk=min(deployment.prefill_chunk, deployment.context),
        vocab_size=deployment.config.vocab_size,
    )


def _compile(
    lowered: jax.stages.Lowered, program: Program, deployment: Deployment
) -> jax.stages.Compiled:
    # Not kept: no program comes back out of the compilation cache without its device.
    name = "jax_enable_compilation_cache"
    before = getattr(jax.config, name)
    jax.config.update(name, False)
    try:
        return lowered.compile({**program.options})
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        said = next((line for line in str(error).splitlines() if line.strip()), "")
        raise ValueError(
            f"{deployment.target.name}: does not fit, says the compiler: {said}"
        ) from None
    finally:
        jax.config.update(name, before)


def _kernels(program: str) -> dict[str, int]:
    names = _KERNEL.findall(program)
    found = Counter("mosaic_gpu" if name == _UNNAMED else name for name in names)
    return dict(sorted(found.items()))
