"""The bandwidth that shares of a floor are quoted against, in all runs alike."""

READ_GBS = 4393.0
"""What torch's float32 sum of 2 to 4 GiB read on three H200s, 2026-11-20 and 2026-11-23: 4,389 to
4,396 GB/s. XLA's sum of 2 GiB reached 4,566 once, so that a share may be a little above 1."""
