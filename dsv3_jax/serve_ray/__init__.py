"""Replicas of a server on Ray Serve. Needs the extra ``ray``; nothing else imports Ray.

In the order a request moves through it:

================== ================================================================
settings.py        what an application is made of
app.py             deployments: fronts, and replicas with an engine each
front_process.py   a front as a process of Ray Serve, with the router of its calls
front.py           relays requests to replicas, tries again when one is lost, joins figures
placement.py       the choice of a replica by prefix and load; pure Python
call.py            one request and its answer between a front and a replica
replica.py         actors with an engine: those that answer requests, and prefill replicas
hosts.py           a replica on several hosts: a placement group, and a process on each
autoscaling.py     the number of replicas, from requests and cache use
================== ================================================================
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv3_jax.serve_ray.app import app_from_config, build_app
    from dsv3_jax.serve_ray.settings import AppSettings, Autoscaling

__all__ = ["AppSettings", "Autoscaling", "app_from_config", "build_app"]

_MODULES = {"AppSettings": "settings", "Autoscaling": "settings"}


def __getattr__(name: str) -> Any:
    """Imports a name on its first use, so that settings can be read without Ray."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES.get(name, 'app')}")
    return getattr(module, name)
