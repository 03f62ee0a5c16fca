"""Tests that never end fail with their names, and the run goes on."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

HANGING = """
import ctypes
import http.client
import http.server
import subprocess
import sys
import threading

import pytest
import uvicorn


def lock_twice(library):
    "pthread_mutex_lock waits for ever the second time; a signal does not end it."
    mutex = ctypes.create_string_buffer(128)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


@pytest.fixture
def thread_without_end():
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    yield
    thread.join()


def test_waits_for_a_thread(thread_without_end):
    pass


def test_fails_before_its_fixture_waits(thread_without_end):
    assert False


def test_waits_for_a_process():
    subprocess.run([sys.executable, "-c", "import time; time.sleep(1000)"])


def test_waits_for_a_server():
    class Silent(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            threading.Event().wait()

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    connection.request("GET", "/")
    connection.getresponse()


def test_serves():
    async def app(scope, receive, send):
        pass

    uvicorn.Server(uvicorn.Config(app, port=0, log_config=None)).run()


def test_waits_in_a_library():
    lock_twice(ctypes.CDLL(None))


def test_waits_in_a_library_with_the_interpreter_locked():
    lock_twice(ctypes.PyDLL(None))


@pytest.mark.parametrize("number", range(20))
def test_passes(number):
    pass
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only for Linux")
def test_hanging_tests_fail_with_their_names(tmp_path):
    (tmp_path / "test_hanging.py").write_text(HANGING)
    settings = {"timeout": 2, "faulthandler_timeout": 6}
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "-p"]
    command += ["tests.support.timeouts", "-n", "2", "--dist", "worksteal", "-rA"]
    command += [f"--override-ini={name}={value}" for name, value in settings.items()]
    done = subprocess.run(
        [*command, tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=400
    )
    results = re.findall(r"^(FAILED|ERROR|PASSED) \S*::(test_\w+)", done.stdout, re.MULTILINE)
    assert set(results) == {
        ("PASSED", "test_passes"),
        ("PASSED", "test_waits_for_a_thread"),
        ("ERROR", "test_waits_for_a_thread"),
        ("FAILED", "test_fails_before_its_fixture_waits"),
        ("ERROR", "test_fails_before_its_fixture_waits"),
        ("FAILED", "test_waits_for_a_process"),
        ("FAILED", "test_waits_for_a_server"),
        ("FAILED", "test_serves"),
        ("FAILED", "test_waits_in_a_library"),
        ("FAILED", "test_waits_in_a_library_with_the_interpreter_locked"),
    }, done.stdout
    assert results.count(("PASSED", "test_passes")) == 20
