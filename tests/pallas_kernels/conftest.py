import jax
import pytest

from tests.pallas_kernels.machine import ON_GPU

if ON_GPU:  # or else the references multiply float32 in TF32
    jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(autouse=True)
def _no_races(capsys):
    """Interpreted kernels have none. The interpreter prints one (since jax 0.12 it raises it too);
    what it keeps in a variable is of its last kernel alone."""
    yield
    assert "RACE DETECTED" not in capsys.readouterr().out
