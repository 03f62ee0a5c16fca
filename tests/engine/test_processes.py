"""An engine on a mesh of several processes."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener

import numpy as np
import pytest

import dsv3_jax
from dsv3_jax.engine.device import processes
from dsv3_jax.engine.device.processes import Follower, Leader, ProcessLostError, check_settings
from dsv3_jax.engine.device.step_input import StepOptions, StepShape
from dsv3_jax.engine.stats import CompileTimes
from tests.engine.process_member import make_engine, tokens_of
from tests.sharding.test_distributed import launch
from tests.support.checkpoints import random_tensors, tiny_config, write_checkpoint

SHAPE = StepShape(2, 1, 8, 12, 48, 1, options=StepOptions("sampled", penalties=True))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    config = tiny_config(num_hidden_layers=2)
    write_checkpoint(directory, config, random_tensors(config))
    return directory


@pytest.fixture
def leader():
    leader = Leader("127.0.0.1", 1, b"key")
    yield leader
    leader.close()


class Running:
    """A follower in a thread, which collects what it is told to launch."""

    def __init__(self, leader, key=b"key", compilations=None):
        self.steps, self.status = [], []
        follower = Follower(leader.address, key)
        self.thread = threading.Thread(
            target=lambda: follower.run(
                lambda *step: self.steps.append(step),
                compilations,
                exit_process=self.status.append,
            ),
            daemon=True,
        )
        self.thread.start()


def test_the_leader_knows_what_followers_compile(leader):
    """Its step waits for them, and is not stuck meanwhile."""
    changes, compilations = queue.SimpleQueue(), CompileTimes()
    leader.compilations.on_change = changes.put
    follower = Running(leader, compilations=compilations)
    leader.wait_for_followers()
    while compilations.on_change.__name__ != "tell":
        time.sleep(0.001)
    with compilations.measure("decodes=4"):
        assert changes.get(timeout=10).program == "decodes=4"
        assert leader.compilations.current.program == "decodes=4"
    assert changes.get(timeout=10) is None
    assert leader.compilations.current is None
    compilations.begin("for ever", "decodes=8")
    assert changes.get(timeout=10).program == "decodes=8"
    leader.close()
    follower.thread.join(10)
    assert changes.get(timeout=10) is None, "a follower that has ended compiles nothing"


def test_a_follower_launches_what_the_leader_launches(leader):
    follower = Running(leader)
    leader.wait_for_followers()
    buffers = [np.arange(12, dtype=np.int32).reshape(shape) for shape in ((12,), (2, 6))]
    for buffer in buffers:
        leader.send(buffer, SHAPE)
    leader.close()
    follower.thread.join(10)
    assert [shape for _, shape in follower.steps] == [SHAPE, SHAPE]
    for (got, _), buffer in zip(follower.steps, buffers, strict=True):
        np.testing.assert_array_equal(got, buffer)
    assert not follower.status, "the leader has ended it"


def test_a_lost_leader_ends_the_follower():
    with Listener(("127.0.0.1", 0), authkey=b"key") as listener:
        follower = Running(listener)
        listener.accept().close()
    follower.thread.join(10)
    assert follower.status == [1]


def test_a_lost_follower_is_noticed(leader):
    waiting = threading.Thread(target=leader.wait_for_followers, daemon=True)
    waiting.start()
    with Client(leader.address, authkey=b"key"):
        waiting.join(10)
        leader.send(np.zeros(1, np.int32), SHAPE)
    end = time.monotonic() + 10
    while not leader.is_lost:
        assert time.monotonic() < end
        time.sleep(0.001)
    with pytest.raises(ProcessLostError, match="got one that was lost"):
        leader.send(np.zeros(1, np.int32), SHAPE)


def test_a_stranger_is_refused(leader):
    waiting = threading.Thread(target=leader.wait_for_followers, daemon=True)
    waiting.start()
    with pytest.raises((AuthenticationError, EOFError, ConnectionError)):
        Client(leader.address, authkey=b"other").recv_bytes()
    follower = Running(leader)
    waiting.join(10)
    assert not waiting.is_alive()
    leader.close()
    follower.thread.join(10)
    assert not follower.status


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\0\0\0\3abc"])
def test_silent_and_other_strangers_do_not_delay_followers(leader, words):
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stranger = stack.enter_context(socket.create_connection(leader.address))
            stranger.sendall(words)
        follower = Running(leader)
        waiting = threading.Thread(target=leader.wait_for_followers, daemon=True)
        waiting.start()
        waiting.join(10)
        assert not waiting.is_alive()
        assert len(leader._connections) == 1
        leader.send(np.zeros(1, np.int32), SHAPE)
        leader.close()
        follower.thread.join(10)
        assert len(follower.steps) == 1


def test_a_handshake_has_a_deadline(leader, monkeypatch):
    monkeypatch.setattr(processes, "_HANDSHAKE_SECONDS", 0.1)
    waiting = threading.Thread(target=leader.wait_for_followers, daemon=True)
    waiting.start()
    with socket.create_connection(leader.address, timeout=10) as stranger:
        while stranger.recv(1024):  # the challenge, then the end
            pass
    assert waiting.is_alive()
    follower = Running(leader)
    waiting.join(10)
    assert not waiting.is_alive()
    leader.close()
    follower.thread.join(10)
    assert not follower.status


def test_a_follower_that_is_lost_early_ends_the_wait():
    leader = Leader("127.0.0.1", 2, b"key")
    lost: list[BaseException] = []

    def wait() -> None:
        with pytest.raises(ProcessLostError) as caught:
            leader.wait_for_followers()
        lost.append(caught.value)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    Client(leader.address, authkey=b"key").close()
    waiting.join(10)
    assert "got one that was lost" in str(lost[0])
    leader.close()


def test_what_needs_whole_arrays_is_refused():
    check_settings(tiers=None, deterministic=False)
    with pytest.raises(ValueError, match="count_routing: expected none on a mesh of several"):
        check_settings(tiers=None, count_routing=True)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp_attention_ep", "tensor_parallel"])
def test_tokens_are_those_of_one_process(checkpoint, tmp_path, layout):
    status, output, _ = launch(
        "serves", checkpoint, tmp_path, layout, processes=2, member="../engine/process_member.py"
    )
    assert status == 0, output
    with make_engine(dsv3_jax.load(checkpoint)[0]) as engine:
        assert json.loads((tmp_path / "tokens.json").read_text()) == tokens_of(engine)
    assert "[0] compiled after warm-up: 0" in output
    assert "[1] request: expected the leader's engine, got a follower's" in output
    assert "[1] the leader has ended" in output


@pytest.mark.slow
def test_a_follower_ends_with_its_leader(checkpoint, tmp_path):
    status, output, _ = launch(
        "dies",
        checkpoint,
        tmp_path,
        "tensor_parallel",
        processes=2,
        member="../engine/process_member.py",
    )
    assert status == 3, output
    assert "the leader has ended" not in output
