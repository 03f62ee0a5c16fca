"""The former path of ``hopper.barriers``."""

from pallas_kernels.hopper.barriers import Barriers
from pallas_kernels.hopper.warpgroup import WARPS

__all__ = ["WARPS", "Barriers"]
