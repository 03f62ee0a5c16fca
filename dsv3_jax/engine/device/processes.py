"""An engine on a mesh of several processes: one leads, the others launch what it launches.

A program on a mesh of several processes runs when every process launches it, all in the same order.
The engine of process 0, the leader, takes the requests, plans and reads the results, which every
process has. It sends the arguments of each step to the followers before it launches the step. A
follower has an engine with the same settings that gets no requests; it launches these steps and
reads nothing.

    leader      plan -> send shape and arguments -> launch -> read results
    follower            receive them -> launch

A process that is lost takes the others with it: a mesh cannot go on without its devices. The leader
then fails the engine at its next launch, and a follower ends its process.

Settings that launch other programs than steps, or that read arrays of other processes, are refused:
tiers, deterministic mode, counting of routed tokens and :meth:`Engine.use`, see
:func:`check_settings`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import Any

import jax
import numpy as np

from dsv3_jax.connections import hang_up
from dsv3_jax.engine.device.step_input import StepOptions, StepShape
from dsv3_jax.engine.stats import Compilation, CompileTimes
from dsv3_jax.generation.errors import EngineError
from sharding import Layout

logger = logging.getLogger(__name__)

_END = b"end"
# Messages of followers. The name of a program follows the first.
_COMPILING, _COMPILED = b"compiling ", b"compiled"

_HANDSHAKE_SECONDS = 30.0
"""Time in which the other side of a connection has to prove that it knows the key."""

_LOOK_SECONDS = 0.1  # between two looks at the followers that have proved it

_STRANGERS = 128  # that may connect before the leader looks, in addition to the followers


class ProcessLostError(EngineError):
    """Another process of the mesh is lost."""


class Leader:
    """The leader's connections to the followers.

    Args:
      host: address to listen on.
      followers: number of followers.
      key: secret that the followers know. Nobody else can connect.
    """

    def __init__(self, host: str, followers: int, key: bytes):
        # A Listener of multiprocessing would wait without end for a stranger's part of the
        # handshake.
        self._listener = socket.create_server((host, 0), backlog=followers + _STRANGERS)
        self._listener.settimeout(_LOOK_SECONDS)
        self._key = key
        self._count = followers
        self._adding = threading.Lock()
        self._connections: list[Connection] = []
        self._lost = threading.Event()
        self._is_closed = False
        self.compilations = CompileTimes()
        """Receives the compilations of the followers, for which steps wait too."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that the followers connect to."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    @property
    def is_lost(self) -> bool:
        """Whether a follower is lost."""
        return self._lost.is_set()

    def wait_for_followers(self) -> None:
        """Waits until every follower has connected, which it does once its programs are compiled.
        Strangers are refused, and do not delay followers."""
        with self._listener:
            while len(self._connections) < self._count:
                self._check()
                try:
                    accepted, address = self._listener.accept()
                except (TimeoutError, ConnectionError):  # nobody, or one that has gone away again
                    continue
                # A step is two messages. The second would wait for the receipt of the first, which
                # the follower's system may delay by 40 ms.
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                arguments = Connection(accepted.detach()), address
                threading.Thread(target=self._greet, args=arguments, daemon=True).start()
        self._check()

    def _greet(self, connection: Connection, address: object) -> None:
        """Adds a connection if the other side proves in time that it knows the key."""
        deadline = threading.Timer(_HANDSHAKE_SECONDS, hang_up, [connection])
        deadline.daemon = True
        deadline.start()
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            is_known = True
        except Exception as error:  # a stranger can send anything
            logger.warning("processes: refused a connection from %s: %r", address, error)
            is_known = False
        finally:
            deadline.cancel()
            deadline.join()  # it uses the connection
        with self._adding:
            if not is_known or len(self._connections) == self._count:
                connection.close()
                return
            self._connections.append(connection)
        threading.Thread(target=self._watch, args=(connection,), daemon=True).start()

    def send(self, buffer: np.ndarray, shape: StepShape) -> None:
        """Tells the followers to launch a step."""
        self._check()
        header = json.dumps({**dataclasses.asdict(shape), "_buffer": buffer.shape}).encode()
        content = np.ascontiguousarray(buffer, np.int32).data.cast("B")
        try:
            for connection in self._connections:
                connection.send_bytes(header)
                connection.send_bytes(content)
        except OSError:
            self._lost.set()
            self._check()

    def close(self) -> None:
        """Ends the followers."""
        self._is_closed = True
        for connection in self._connections:
            try:
                connection.send_bytes(_END)
            except OSError:
                self._lost.set()

    def _check(self) -> None:
        if self.is_lost:
            raise ProcessLostError("processes: expected all of the mesh, got one that was lost")

    def _watch(self, connection: Connection) -> None:
        """Receives when a follower compiles, until the end of its connection."""
        try:
            while True:
                message = connection.recv_bytes()
                if message.startswith(_COMPILING):
                    program = message.removeprefix(_COMPILING).decode()
                    self.compilations.begin(connection, program)
                else:
                    self.compilations.end(connection)
        except (EOFError, OSError):
            if not self._is_closed:
                self._lost.set()
            self.compilations.end(connection)


@dataclasses.dataclass(frozen=True)
class Follower:
    """A follower's part.

    Args:
      address: of the leader.
      key: the leader's secret.
    """

    address: tuple[str, int]
    key: bytes = dataclasses.field(repr=False)

    def run(
        self,
        replay: Callable[[np.ndarray, StepShape], object],
        compilations: CompileTimes | None = None,
        *,
        exit_process: Callable[[int], object] = os._exit,
    ) -> None:
        """Launches the leader's steps until it ends the engine. Call it when all programs are
        compiled.

        If the leader is lost it ends the process with status 1: a step that waits for the leader's
        devices may never return.

        Args:
          replay: launches a step, see :meth:`dsv3_jax.engine.device.executor.Executor.replay`.
          compilations: those that steps wait for. The leader is told of them.
        """
        with Client(self.address, authkey=self.key) as connection:

            def tell(compilation: Compilation | None) -> None:
                program = None if compilation is None else compilation.program.encode()
                with contextlib.suppress(OSError):  # the leader is lost, which is noticed below
                    connection.send_bytes(_COMPILED if program is None else _COMPILING + program)

            if compilations is not None:
                compilations.on_change = tell
            try:
                while (header := connection.recv_bytes()) != _END:
                    fields = json.loads(header)
                    buffer_shape = fields.pop("_buffer")
                    buffer = np.frombuffer(connection.recv_bytes(), np.int32).reshape(buffer_shape)
                    options = StepOptions(**fields.pop("options"))
                    replay(buffer, StepShape(**fields, options=options))
            except (EOFError, OSError):
                exit_process(1)


def check_settings(**settings: Any) -> None:
    """Raises ValueError for the first setting that is given: several processes support none."""
    for name, value in settings.items():
        if value:
            raise ValueError(
                f"{name}: expected none on a mesh of several processes, got {value!r:.100}; each"
                " process has a part of the arrays alone"
            )


def spans_processes(layout: Layout | None) -> bool:
    """Returns whether a layout's mesh has devices of several processes."""
    mesh = None if layout is None else layout.mesh
    return isinstance(mesh, jax.sharding.Mesh) and mesh.is_multi_process
