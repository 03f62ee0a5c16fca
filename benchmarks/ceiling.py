"""The bandwidth that all reports use as 100 % of the peak."""

READ_GBS = 4393.0
"""Read bandwidth of torch's float32 sum of 2 to 4 GiB on three H200s, measured on 2026-11-20 and
2026-11-23 as 4,389 to 4,396 GB/s. XLA's sum of 2 GiB reached 4,566 GB/s once, so a reported share
may slightly exceed 100 %."""
