"""Constants of a softmax in base 2."""

from __future__ import annotations

import math

LOG2E = math.log2(math.e)
NO_SCORE = -1e30
"""Initial running maximum: finite, because -inf - -inf would be NaN."""
