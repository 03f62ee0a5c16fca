"""Settings of an application of replicas. They are checked before anything starts."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, NoReturn

from dsv3_jax.cli.arguments.parser import Parser
from dsv3_jax.cli.arguments.servers import add_serve
from dsv3_jax.cli.serve import check_arguments
from dsv3_jax.generation.settings import check

_OF_THE_PROCESS = ("host", "port", "one_process", "transfer_port", "log_level")
_OF_THE_ROLE = ("role", "prefill_url", "prefill_api_key_file")
"""Flags of ``dsv3 serve`` that a replica has no use for: it knows its address and its peers."""
_OF_ONE_HOST = {
    "host_cache_gib": "each host has a part of a page",
    "disk_cache": "each host has a part of a page",
    "program_store": "compiled programs have only been loaded on one host; compile_cache works",
}
"""Flags that replicas of several hosts cannot have, and why."""
_OF_DECODE = ("prefill_seconds", "prefill_min_tokens")
"""Flags that prefill replicas do not get."""
_OF_A_PAGE = ("dtype", "quantization", "activations", "cache_dtype")
"""Flags that determine the contents of a page, and must therefore be the same in both pools."""


@dataclasses.dataclass(frozen=True)
class Autoscaling:
    """Settings of the number of replicas. The names are those of Ray Serve, where it has them."""

    min_replicas: int = 1
    max_replicas: int = 1
    target_ongoing_requests: float | None = None
    """Open requests of a replica, running and waiting, at which their number stays. None takes
    three quarters of ``max_running``."""
    target_cache_usage: float = 0.8
    """Share of a replica's cache in use at which their number stays, above 0 and up to 1."""
    upscale_delay_s: float = 10.0
    """Time for which more replicas must be wanted before they are started."""
    downscale_delay_s: float = 300.0
    """Time for which fewer replicas must be wanted before some are stopped."""
    look_back_period_s: float = 30.0
    """Time over which the figures are averaged."""

    def __post_init__(self) -> None:
        check("min_replicas", self.min_replicas, "an integer of at least 1", Integral, 1)
        expected = f"an integer of at least min_replicas={self.min_replicas}"
        check("max_replicas", self.max_replicas, expected, Integral, self.min_replicas)
        if self.target_ongoing_requests is not None:
            value = self.target_ongoing_requests
            check("target_ongoing_requests", value, "a number above 0", Real, 1e-3)
        expected = "a share from 0.01 to 1"
        check("target_cache_usage", self.target_cache_usage, expected, Real, 0.01, 1)
        for name in ("upscale_delay_s", "downscale_delay_s", "look_back_period_s"):
            check(name, getattr(self, name), "seconds from 0 to 86400", Real, 0, 86400)


@dataclasses.dataclass(frozen=True)
class PrefillPool:
    """Settings of the prefill replicas, where they differ from those of the other replicas."""

    serve: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Flags of ``dsv3 serve``, in addition to those of the application or instead of them."""
    autoscaling: Autoscaling = Autoscaling()
    """Number of replicas. An open request of theirs is a prompt."""
    resources: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"num_cpus": 1})
    """Resources that Ray reserves for a replica."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> PrefillPool:
        """Returns the settings with these values, see :meth:`AppSettings.of`."""
        return _make(cls, _with_autoscaling(values))


@dataclasses.dataclass(frozen=True)
class AppSettings:
    """Settings of an application: one model, its replicas, and the fronts before them."""

    model: str = "demo"
    """``--model`` of ``dsv3 serve``."""
    serve: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further flags of ``dsv3 serve`` for every replica, such as ``{"max_running": 8}``. A list
    repeats its flag."""
    autoscaling: Autoscaling = Autoscaling()
    """Number of replicas."""
    resources: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"num_cpus": 1})
    """Resources that Ray reserves for a replica, such as ``{"num_cpus": 4, "num_gpus": 8}``."""
    prefill: PrefillPool | None = None
    """Replicas that compute the pages of prompts, see docs/disaggregation.md. The other replicas
    then pull these pages and generate. None: each replica does both."""
    hosts: int = 1
    """Hosts of a replica, each a node of Ray with ``resources`` of its own. With more than one,
    ``serve`` needs a ``layout``, which is over the devices of all."""
    fronts: int = 1
    """Processes that receive requests and send them to replicas."""
    attempts: int = 3
    """Most replicas that one request is sent to, if replicas are lost."""
    load_bound: float = 1.25
    """Most load of a replica, in multiples of the mean load. Requests beyond it go to another
    replica than the one that has their prefix."""
    max_queued_requests: int = 1000
    """Most requests that wait for a replica in one front. More get status 503."""
    health_check_period_s: float = 5.0
    """Time between two looks at a replica's engine."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> AppSettings:
        """Returns the settings with these values. Those of ``autoscaling`` and ``prefill`` may be
        mappings.

        Raises:
          ValueError: a value has no setting, or is out of range.
        """
        given = _with_autoscaling(values)
        if isinstance(pool := given.get("prefill"), Mapping):
            given["prefill"] = PrefillPool.of(pool)
        return _make(cls, given)

    def __post_init__(self) -> None:
        check("fronts", self.fronts, "an integer of at least 1", Integral, 1)
        check("attempts", self.attempts, "an integer from 1 to 10", Integral, 1, 10)
        check("load_bound", self.load_bound, "a number from 1 to 100", Real, 1, 100)
        expected = "an integer of at least 1"
        check("max_queued_requests", self.max_queued_requests, expected, Integral, 1)
        expected = "seconds from 0.1 to 3600"
        check("health_check_period_s", self.health_check_period_s, expected, Real, 0.1, 3600)
        check("hosts", self.hosts, "an integer of at least 1", Integral, 1)
        arguments = self.arguments  # which checks them
        if self.hosts > 1:
            self._check_hosts(arguments)
        if self.prefill is not None:
            self._check_prefill(arguments, self.prefill_arguments)

    def _check_prefill(self, decode: argparse.Namespace, prefill: argparse.Namespace) -> None:
        """Raises ValueError for pools that would refuse each other's pages."""
        values = [(name, getattr(decode, name), getattr(prefill, name)) for name in _OF_A_PAGE]
        values.append(("transfer", decode.transfer or "http", prefill.transfer or "http"))
        if _caches_drafts(decode) != _caches_drafts(prefill):
            values.append(("draft", decode.draft, prefill.draft))
        for name, expected, given in values:
            if given != expected:
                raise ValueError(
                    f"prefill: serve: {name}: expected {expected}, as in serve, got {given}"
                )

    def _check_hosts(self, arguments: argparse.Namespace) -> None:
        """Raises ValueError for what a replica of several hosts cannot have."""
        if arguments.layout is None:
            raise ValueError(f"hosts: expected a layout in serve with {self.hosts} hosts, got none")
        if not any(self.resources.values()):
            raise ValueError(f"resources: expected some of each of {self.hosts} hosts, got none")
        if self.prefill is not None:
            reason = _OF_ONE_HOST["host_cache_gib"]
            raise ValueError(f"prefill: expected none with {self.hosts} hosts, got one; {reason}")
        for name, reason in _OF_ONE_HOST.items():
            if value := getattr(arguments, name):
                raise ValueError(
                    f"{name}: expected none with {self.hosts} hosts, got {value}; {reason}"
                )

    @property
    def arguments(self) -> argparse.Namespace:
        """The arguments of a replica that answers requests, as ``dsv3 serve`` parses them."""
        return self._parsed(self.serve, "both" if self.prefill is None else "decode")

    @property
    def prefill_arguments(self) -> argparse.Namespace:
        """The arguments of a prefill replica."""
        assert self.prefill is not None, "expected settings with a prefill pool"
        flags = {**_by_name(self.serve), **_by_name(self.prefill.serve)}
        shared = {name: flags[name] for name in flags if name not in _OF_DECODE}
        return self._parsed(shared, "prefill")

    def _parsed(self, flags: Mapping[str, Any], role: str) -> argparse.Namespace:
        words = ["--model", self.model, "--role", role]
        for name, value in _by_name(flags).items():
            if name in (*_OF_THE_PROCESS, *_OF_THE_ROLE, "model"):
                raise ValueError(f"serve: {name}: expected a flag of the engine or its API, got it")
            flag = name.replace("_", "-")
            for each in value if isinstance(value, (list, tuple)) else [value]:
                words += [f"--{flag}"] if each is True else [f"--{flag}", str(each)]
        parser = _Parser(prog="serve", add_help=False, allow_abbrev=False)
        add_serve(parser)
        arguments = parser.parse_args(words)
        check_arguments(arguments)
        return arguments

    @property
    def max_requests(self) -> int:
        """Most completions that run and wait in a replica."""
        return self.arguments.max_running + self.arguments.max_waiting

    @property
    def target_ongoing_requests(self) -> float:
        """Open requests of a replica at which the number of replicas stays."""
        return _target(self.autoscaling, self.arguments)

    @property
    def prefill_target_ongoing_requests(self) -> float:
        """Open prompts of a prefill replica at which their number stays."""
        assert self.prefill is not None, "expected settings with a prefill pool"
        return _target(self.prefill.autoscaling, self.prefill_arguments)


def _caches_drafts(arguments: argparse.Namespace) -> bool:
    """Returns whether pages have entries of the MTP layer, which all drafters but ``ngram`` use."""
    return arguments.draft not in ("none", "ngram")


def _target(scaling: Autoscaling, arguments: argparse.Namespace) -> float:
    given = scaling.target_ongoing_requests
    return math.ceil(0.75 * arguments.max_running) if given is None else given


class _Parser(Parser):
    """A parser that raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"serve: {message}")


def _by_name(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Returns flags by their names with underscores."""
    return {name.replace("-", "_"): value for name, value in flags.items()}


def _with_autoscaling(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values in which ``autoscaling`` is no mapping."""
    given = dict(values)
    if isinstance(scaling := given.get("autoscaling"), Mapping):
        given["autoscaling"] = _make(Autoscaling, scaling)
    return given


def _make(kind: type, values: Mapping[str, Any]) -> Any:
    """Returns a dataclass, or raises ValueError for a name that it does not have."""
    names = [field.name for field in dataclasses.fields(kind)]
    if unknown := [str(name) for name in values if name not in names]:
        raise ValueError(f"{unknown[0]}: expected one of {', '.join(names)}")
    return kind(**values)
