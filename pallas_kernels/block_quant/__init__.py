"""Block-scaled float8."""
