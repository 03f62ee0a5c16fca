import jax
import pytest

from tests.pallas_kernels.machine import ON_GPU

if ON_GPU:  # otherwise the references multiply float32 in TF32
    jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(autouse=True)
def _no_races(capsys):
    """Fails a test if the interpreter has found a race.

    The interpreter prints races, and since jax 0.12 also raises an error. Its variable with races
    covers only the last kernel.
    """
    yield
    assert "RACE DETECTED" not in capsys.readouterr().out
