"""Memory of a training run on a target, without its devices: the estimate and the compiler's own
figures."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, SingleDeviceSharding

from dsv3_jax.config import ModelConfig
from dsv3_jax.initialization import abstract_model
from dsv3_jax.plan.target import Target
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.memory import TrainingMemory, remedy, step_memory
from dsv3_jax.training.settings import RunSettings
from dsv3_jax.training.trainable import check_settings
from dsv3_jax.training.trainer import Trainer
from sharding import Layout, abstract_layout, make_layout

_TPU_NAMES = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "tpu7x": "TPU7x"}

# Arrays on the mesh of one device have no sharding in their types, as without a mesh.
_AUTOMATIC = (AxisType.Auto,)


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """A model, its devices, and the settings of a training run.

    Raises:
      ValueError: a setting does not fit the model or the number of devices.
    """

    config: ModelConfig
    """Low-rank updates are of weights in the config's dtype and quantization. Otherwise weights are
    float32."""
    target: Target
    training: TrainingConfig
    settings: RunSettings
    layout_name: str
    """Name of a layout. ``"single"`` trains without one, on one device."""
    expert_devices: int | None = None
    context_devices: int | None = None
    """Both as in :func:`sharding.make_layout`."""

    def __post_init__(self) -> None:
        if self.layout_name == "single" and self.target.devices > 1:
            raise ValueError(
                f"layout: expected one over {self.target.devices} devices, such as train, got"
                " single"
            )
        check_settings(self._model(self._abstract_layout()), self.training, self.settings)

    def memory(self) -> TrainingMemory:
        """Returns the estimated memory of one device during a step."""
        with self._on_target():
            trainer = self._trainer(self.training)
            return step_memory(trainer, self.settings.batch, self.settings.length)

    def remedy(self, available: int) -> str:
        """Returns settings that fit, or by how much nothing fits:
        :func:`dsv3_jax.training.memory.remedy`."""
        with self._on_target():
            return remedy(self._trainer, self.training, self.settings, available)

    def lower(self, devices: Sequence[Any]) -> jax.stages.Lowered:
        """Lowers the step for devices that may be those of a topology description."""
        settings = self.settings
        if self.layout_name != "single":
            layout = make_layout(
                self.layout_name,
                devices=devices,
                expert_devices=self.expert_devices,
                context_devices=self.context_devices,
            )
            with jax.sharding.use_abstract_mesh(layout.mesh.abstract_mesh):
                trainer = Trainer(self._model(layout), self.training)
                shapes = trainer.step_shapes(settings.batch, settings.length)
                return trainer.programs.step.lower(*shapes)
        sharding = SingleDeviceSharding(devices[0])
        mesh = Mesh(np.array(devices[:1]), ("device",), axis_types=_AUTOMATIC)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            trainer = Trainer(self._model(None), self.training)
            shapes = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
                trainer.step_shapes(settings.batch, settings.length),
            )
            return trainer.programs.step.lower(*shapes)

    def _trainer(self, training: TrainingConfig) -> Trainer:
        return Trainer(self._model(self._abstract_layout()), training)

    def _model(self, layout: Layout | None) -> Any:
        dtype, quantization = jnp.dtype(jnp.float32), None
        if self.training.lora_rank:
            dtype, quantization = jnp.dtype(self.config.dtype), self.config.quantization
        model = abstract_model(self.config, dtype=dtype, quantization=quantization)
        if layout is not None:
            model.lay_out(layout)
        return model

    def _abstract_layout(self) -> Layout | None:
        if self.layout_name == "single":
            return None
        layout = abstract_layout(
            self.layout_name,
            self.target.devices,
            expert_devices=self.expert_devices,
            context_devices=self.context_devices,
        )
        mesh: Any = layout.mesh
        mesh = mesh.update(abstract_device=self._device())
        return dataclasses.replace(layout, mesh=mesh)

    def _device(self) -> AbstractDevice:
        kind, platform = self.target.kind, self.target.platform
        name = _TPU_NAMES[kind] if platform == "tpu" else f"NVIDIA {kind.upper()}"
        return AbstractDevice(device_kind=name, num_cores=None, platform=platform)

    @contextlib.contextmanager
    def _on_target(self) -> Iterator[None]:
        """Traces for the devices of the target."""
        layout = self._abstract_layout()
        # The mesh of an abstract layout is abstract, which its type does not say.
        mesh: Any = AbstractMesh(
            (1,), ("device",), axis_types=_AUTOMATIC, abstract_device=self._device()
        )
        if layout is not None:
            mesh = layout.mesh
        with jax.sharding.use_abstract_mesh(mesh):
            yield
