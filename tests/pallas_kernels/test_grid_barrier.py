"""The barrier across a grid, in the interpreter and as a model of its counter."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper import H200_SMS
from pallas_kernels.hopper.grid_barrier import FLIP, GridBarrier, arrival, new_counter
from tests.pallas_kernels.grid_barrier_kernel import grid_barrier
from tests.pallas_kernels.machine import INTERPRET, kernel_runs


@kernel_runs
@pytest.mark.parametrize(("programs", "rounds"), [(3, 3), (1, 2)])
def test_every_program_sees_what_the_others_wrote(programs, rounds):
    wrong, _ = grid_barrier(new_counter(), programs=programs, rounds=rounds, interpret=INTERPRET)
    np.testing.assert_array_equal(wrong, np.zeros(programs))


def test_more_programs_than_multiprocessors_are_refused():
    with pytest.raises(NotImplementedError, match=f"at most {H200_SMS} programs.* got 133"):
        grid_barrier(new_counter(), programs=H200_SMS + 1, rounds=1)
    assert GridBarrier.launch(H200_SMS, None)["grid"] == {"cta": H200_SMS}


@pytest.mark.parametrize("programs", [1, 2, 132])
def test_arrivals_add_up_to_the_flip_of_one_bit(programs):
    total = sum(arrival(program, programs) for program in range(programs))
    assert total % 2**32 == FLIP
    assert all(-FLIP <= arrival(p, programs) < FLIP for p in range(programs))


@pytest.mark.parametrize("start", [0, FLIP])
@pytest.mark.parametrize(("programs", "uses"), [(1, 3), (2, 3), (3, 2)])
def test_no_order_of_arrivals_lets_a_program_pass_early_or_wait_for_ever(programs, uses, start):
    """Follows every order in which programs can arrive and pass, from a counter in either state.

    A program's state is the number of its arrivals, whether it waits, and the bit that it saw.
    """

    @functools.cache
    def explore(counter, states):
        arrived = [n for n, _, _ in states]
        steps = 0
        for p, (n, waits, bit) in enumerate(states):
            if not waits and n < uses:
                following = (n + 1, True, counter >> 31)
                after = (counter + arrival(p, programs)) % 2**32
            elif waits and counter >> 31 != bit:
                assert min(arrived) >= n, f"program {p} passed use {n} of {arrived}"
                following, after = (n, False, 0), counter
            else:
                continue
            steps += 1
            explore(after, (*states[:p], following, *states[p + 1 :]))
        if not steps:
            assert all(state == (uses, False, 0) for state in states), f"{states} wait for ever"
            assert counter % FLIP == 0

    explore(start, ((0, False, 0),) * programs)


def test_a_new_counter_has_no_arrivals():
    assert new_counter().dtype == jnp.int32
    assert not np.any(new_counter())
