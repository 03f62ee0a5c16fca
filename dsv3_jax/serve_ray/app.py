"""Applications of Ray Serve: fronts, and replicas with an engine each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve  # pyright: ignore[reportMissingImports]
from ray.serve.config import (  # pyright: ignore[reportMissingImports]
    AutoscalingConfig,
    AutoscalingPolicy,
    RequestRouterConfig,
)

from dsv3_jax.serve_ray.autoscaling import QueueAndCachePolicy
from dsv3_jax.serve_ray.front_process import ENGINE, PREFILL, PrefixRouter, make_front
from dsv3_jax.serve_ray.hosts import STRATEGY, actor_options, bundles
from dsv3_jax.serve_ray.replica import EngineReplica, PrefillReplica
from dsv3_jax.serve_ray.settings import AppSettings, Autoscaling

_ENDING_SECONDS = 10  # time to end after open requests had theirs


def build_app(model: str = "demo", **settings: Any) -> serve.Application:
    """Returns an application of Ray Serve that serves one model with OpenAI's API.

    ``serve.run(build_app("demo"))`` starts it.

    Args:
      model: as ``dsv3 serve --model``.
      settings: fields of :class:`AppSettings` by name.

    Raises:
      ValueError: a setting is unknown or out of range.
    """
    return application(AppSettings.of({"model": model, **settings}))


def app_from_config(values: Mapping[str, Any]) -> serve.Application:
    """Returns the application for ``args`` of a config file, whose ``import_path`` is this function
    (``dsv3_jax.serve_ray:app_from_config``)."""
    return build_app(**values)


def application(
    settings: AppSettings,
    replica: type[EngineReplica] = EngineReplica,
    prefill_replica: type[PrefillReplica] = PrefillReplica,
) -> serve.Application:
    """Returns the application with these settings."""
    drain_seconds = settings.arguments.drain_seconds + _ENDING_SECONDS
    several_hosts = {
        "placement_group_bundles": bundles(settings),
        "placement_group_strategy": STRATEGY,
    }
    engines: Any = serve.deployment(
        replica,
        name=ENGINE,
        ray_actor_options=actor_options(settings.resources),
        **({} if settings.hosts == 1 else several_hosts),
        max_ongoing_requests=settings.max_requests,
        max_queued_requests=settings.max_queued_requests,
        autoscaling_config=_autoscaling(settings.autoscaling, settings.target_ongoing_requests),
        graceful_shutdown_timeout_s=drain_seconds,
        health_check_period_s=settings.health_check_period_s,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter,  # pyright: ignore[reportArgumentType]
            request_router_kwargs={"load_bound": settings.load_bound},
        ),
    )
    most = settings.max_requests * settings.autoscaling.max_replicas
    fronts: Any = serve.deployment(
        serve.ingress(lambda: make_front(settings))(),
        name="front",
        num_replicas=settings.fronts,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=most + settings.max_queued_requests,
        graceful_shutdown_timeout_s=drain_seconds,
    )
    pool = settings.prefill
    if pool is None:
        engine = engines.bind(settings)
    else:
        prefills: Any = serve.deployment(
            prefill_replica,
            name=PREFILL,
            ray_actor_options=actor_options(pool.resources),
            autoscaling_config=_autoscaling(
                pool.autoscaling, settings.prefill_target_ongoing_requests
            ),
            graceful_shutdown_timeout_s=drain_seconds,
            health_check_period_s=settings.health_check_period_s,
        )
        engine = engines.bind(settings, prefills.bind(settings))
    return fronts.bind(engine)


def _autoscaling(scaling: Autoscaling, target_ongoing_requests: float) -> AutoscalingConfig:
    return AutoscalingConfig(
        min_replicas=scaling.min_replicas,
        max_replicas=scaling.max_replicas,
        target_ongoing_requests=target_ongoing_requests,
        upscale_delay_s=scaling.upscale_delay_s,
        downscale_delay_s=scaling.downscale_delay_s,
        look_back_period_s=scaling.look_back_period_s,
        policy=AutoscalingPolicy(
            policy_function=QueueAndCachePolicy,
            policy_kwargs={"target_cache_usage": scaling.target_cache_usage},
        ),
    )
