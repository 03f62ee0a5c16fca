"""Tests of the schedules, against values computed by hand, and of refused hyperparameters."""

import dataclasses
import re

import pytest

from dsv3_jax.training import optimizer
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.trainer import Trainer
from tests.training.tiny import RUN, step

LONG = TrainingConfig(
    steps=1000,
    learning_rate=0.5,
    final_learning_rate=0.1,
    warmup_steps=100,
    decay_start=0.4,
    decay_end=0.8,
    mtp_weight=0.25,
    final_mtp_weight=0.125,
    mtp_weight_switch=0.3,
    bias_update_speed=0.01,
    bias_update_end=0.9,
)


def test_learning_rate():
    """The rate rises by 0.005 per step, from the first step on, to 0.5. It falls to 0.1 from step
    400 to step 800. After a quarter of the decay the cosine is 1/sqrt(2)."""
    rate = optimizer.learning_rate(LONG)
    quarter = 0.1 + 0.4 * (1 + 0.5**0.5) / 2
    values = {0: 0.005, 1: 0.01, 49: 0.25, 98: 0.495, 99: 0.5, 100: 0.5, 250: 0.5, 400: 0.5}
    values |= {500: quarter, 600: 0.3, 700: 0.6 - quarter, 800: 0.1, 999: 0.1, 5000: 0.1}
    for count, want in values.items():
        assert float(rate(count)) == pytest.approx(want, rel=1e-5, abs=1e-9), count


@pytest.mark.parametrize("warmup_steps", [0, 1, 2, 7])
def test_the_first_step_has_a_learning_rate(warmup_steps):
    """Every step has one, and the last one of the warm-up has the peak."""
    rate = optimizer.learning_rate(dataclasses.replace(LONG, warmup_steps=warmup_steps))
    rates = [float(rate(count)) for count in range(max(warmup_steps, 1))]
    assert rates == pytest.approx([0.5 * (n + 1) / len(rates) for n in range(len(rates))])


def test_learning_rate_without_warm_up_or_constant():
    rate = optimizer.learning_rate(dataclasses.replace(LONG, warmup_steps=0))
    assert [float(rate(n)) for n in (0, 399)] == [0.5, 0.5]
    rate = optimizer.learning_rate(dataclasses.replace(LONG, decay_start=0.0, decay_end=1.0))
    assert [float(rate(n)) for n in (100, 550)] == pytest.approx([0.5, 0.3])
    assert float(rate(101)) < 0.5


def test_switches():
    weight, speed = optimizer.mtp_weight(LONG), optimizer.bias_update_speed(LONG)
    assert [float(weight(n)) for n in (0, 299, 300, 5000)] == [0.25, 0.25, 0.125, 0.125]
    assert [float(speed(n)) for n in (0, 899)] == pytest.approx([0.01, 0.01])
    assert [float(speed(n)) for n in (900, 5000)] == [0, 0]


def test_biases_are_constant_with_low_rank_updates():
    speed = optimizer.bias_update_speed(dataclasses.replace(LONG, lora_rank=4))
    assert float(speed(0)) == 0


def test_the_reports_run():
    """In 14.8T tokens, at a billion per step, the rate is constant up to 10T, decays over 4.3T, and
    is constant for the last 500B."""
    run = TrainingConfig(steps=14800, learning_rate=2.2e-4, final_learning_rate=2.2e-5)
    assert [run.step_at(f) for f in (run.decay_start, run.decay_end)] == [10000, 14300]
    assert [run.step_at(f) for f in (run.mtp_weight_switch, run.bias_update_end)] == [10000, 14300]
    assert (run.mtp_weight, run.final_mtp_weight) == (0.3, 0.1)
    assert (run.bias_update_speed, run.balance_weight) == (0.001, 1e-4)
    assert (run.betas, run.weight_decay, run.clip_norm) == ((0.9, 0.95), 0.1, 1.0)


@pytest.mark.slow
def test_a_step_follows_the_schedules(trainer: Trainer):
    state = trainer.init()
    for count in range(20):
        state, metrics = step(trainer, state)
        rate = float(optimizer.learning_rate(RUN)(count))
        assert float(metrics.learning_rate) == pytest.approx(rate, rel=1e-6)
        assert float(metrics.mtp_weight) == pytest.approx(0.3 if count < 16 else 0.1)
    assert RUN.step_at(RUN.mtp_weight_switch) == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps: expected at least 1, got 0"),
        ({"accumulate": 0}, "accumulate: expected at least 1, got 0"),
        ({"learning_rate": 0.0}, "learning_rate: expected a positive number, got 0.0"),
        ({"learning_rate": float("nan")}, "learning_rate: expected a positive number, got nan"),
        (
            {"final_learning_rate": 0.6},
            "final_learning_rate: expected 0 to learning_rate, 0.5, got 0.6",
        ),
        ({"warmup_steps": -1}, "warmup_steps: expected at least 0, got -1"),
        (
            {"warmup_steps": 800},
            "warmup_steps: expected fewer than 800 (decay_end), got 800",
        ),
        ({"decay_end": 0.4}, "decay_end: expected more than 0.4, got 0.4"),
        ({"decay_start": -0.1}, "decay_start: expected a fraction of the steps, 0 to 1, got -0.1"),
        (
            {"mtp_weight_switch": 500.0},
            "mtp_weight_switch: expected a fraction of the steps, 0 to 1, got 500.0",
        ),
        (
            {"bias_update_end": 1.5},
            "bias_update_end: expected a fraction of the steps, 0 to 1, got 1.5",
        ),
        (
            {"betas": (0.9, 1.0)},
            "betas: expected two numbers in [0, 1), got (0.9, 1.0)",
        ),
        (
            {"betas": (0.9, 0.999), "moments_dtype": "bfloat16"},
            "betas: expected at most 0.99 with moments_dtype bfloat16, got (0.9, 0.999)",
        ),
        ({"qk_clip": -1.0}, "qk_clip: expected a number of at least 0, got -1.0"),
        ({"qk_clip": 100.0, "lora_rank": 2}, "lora_rank: expected 0 with qk_clip, got 2"),
        ({"qk_clip": 100.0, "scan_layers": True}, "scan_layers: expected False with qk_clip, got"),
        ({"moments_dtype": "fp8"}, "moments_dtype: expected bfloat16 or float32, got 'fp8'"),
        ({"mtp_weight": -0.3}, "mtp_weight: expected a number of at least 0, got -0.3"),
        ({"balance_weight": float("inf")}, "balance_weight: expected a number of at least 0, got"),
        ({"clip_norm": 0.0}, "clip_norm: expected a positive number, got 0.0"),
        ({"lora_rank": -1}, "lora_rank: expected at least 0, got -1"),
        (
            {"compute_dtype": "float16"},
            "compute_dtype: expected bfloat16 or float32, got 'float16'",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_refused_hyperparameters(change, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}") as refused:
        dataclasses.replace(LONG, **change)
    assert "\n" not in str(refused.value)
