"""Settings of the whole suite: eight simulated CPU devices and a persistent compilation cache.

JAX_PLATFORMS selects another platform.
"""

import ctypes
import gc
import os
import signal
from pathlib import Path

from tests.support.xla_flags import fast_compilation

# A background job of a shell ignores Ctrl-C, and so would its children. Tests of interrupts would
# then fail.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# jax reads these variables once, when it is imported.
os.environ["XLA_FLAGS"] = f"{fast_compilation(devices=8)} {os.environ.get('XLA_FLAGS', '')}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The processes that tests start compile many of the same programs.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(__file__).parents[1] / ".jax_cache")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.5"

import jax
import jaxtyping
import pytest

from tests.support import covering

pytest_plugins = ["tests.support.shares", "tests.support.timeouts"]

# JAX traces create many long-lived objects. With Python's default thresholds, garbage collection
# takes a tenth of the time.
gc.set_threshold(100_000, 50, 1000)


def pytest_addoption(parser):
    parser.addoption(
        "--covering-seed",
        type=int,
        default=covering.DEFAULT_SEED,
        help="seed of the random samples in addition to covering sets (default: %(default)s)",
    )


def pytest_report_header(config):
    return f"covering sets: --covering-seed {config.getoption('--covering-seed')}"


def pytest_generate_tests(metafunc):
    covering.generate(metafunc)


@pytest.fixture(scope="module")
def own_compile_cache():
    """Restores the suite's compilation cache after tests of the command, which sets its own."""
    names = (
        "jax_enable_compilation_cache",
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def untyped():
    """Disables the suite's type checks, so that our own error messages appear, as for users."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def cleared_at() -> list[int]:
    """Resident bytes of this process each time that its compiled functions were cleared."""
    return [0]


@pytest.fixture(autouse=True, scope="module")
def few_compiled_functions(cleared_at):
    """Clears compiled functions before there are too many.

    XLA maps memory for each of them, and a Linux process aborts after 65,530 memory maps. In CI
    three processes of tests share a machine's memory.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and (
        maps.read_bytes().count(b"\n") > 30_000
        or _resident_bytes() > cleared_at[-1] + 4_000_000_000
    ):
        jax.clear_caches()
        gc.collect()
        # glibc keeps freed memory otherwise. Other C libraries lack the function.
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
        cleared_at.append(_resident_bytes())


def _resident_bytes() -> int:
    """Returns the size of the memory that this process uses, on Linux."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
