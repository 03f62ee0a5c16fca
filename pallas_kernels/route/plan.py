"""Plans of the Hopper kernel of route: tokens and experts of its programs and warps."""

from __future__ import annotations

import dataclasses

from pallas_kernels.route.lanes import LANES, WARPS

ONE_KERNEL_TOKENS = 128
"""Most tokens for which a cluster does everything in one kernel. A second kernel costs half a
microsecond or one, and less than a second token of each warp of the cluster."""

MAX_TOKENS = 16384
_CLUSTER = 8  # programs of a cluster
_MULTIPROCESSORS = 132
_WARPGROUPS = 4  # of a program, at most
_WORD = 32  # bits


@dataclasses.dataclass(frozen=True)
class Plan:
    """Each warp takes ``steps`` tokens in turn. A warpgroup's tokens are consecutive."""

    programs: int
    warpgroups: int
    steps: int
    columns: int
    """Columns of a table with one column per expert, and one for the invalid tokens if there may be
    any. A multiple of a program's threads."""

    one_kernel: bool
    """Whether the programs form a cluster, so that one kernel suffices."""

    @property
    def words(self) -> int:
        """Words with a bit for each token of a warpgroup."""
        return -(-WARPS * self.steps // _WORD)

    @property
    def program_words(self) -> int:
        """Words with a bit for each token of a program and each column."""
        return self.warpgroups * self.words * self.columns

    @property
    def rounds(self) -> int:
        """Columns of each thread of a program."""
        return self.columns // (self.warpgroups * WARPS * LANES)


def plan_of(tokens: int, columns: int, one_kernel: bool | None = None) -> Plan:
    """Returns the plan for a number of tokens and of columns that are needed.

    Args:
      one_kernel: see :class:`Plan`; by default whichever is expected to take less time.
    """
    if one_kernel is None:
        one_kernel = tokens <= ONE_KERNEL_TOKENS
    if one_kernel:
        programs = min(_CLUSTER, 1 << (-(-tokens // WARPS) - 1).bit_length())
        warpgroups = min(_WARPGROUPS, -(-tokens // (WARPS * programs)))
        steps = -(-tokens // (WARPS * warpgroups * programs))
    else:
        warpgroups = _WARPGROUPS
        steps = -(-tokens // (WARPS * warpgroups * _MULTIPROCESSORS))
        programs = -(-tokens // (WARPS * warpgroups * steps))
    threads = warpgroups * WARPS * LANES
    return Plan(programs, warpgroups, steps, -(-columns // threads) * threads, one_kernel)
