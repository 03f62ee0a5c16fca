"""Block-scaled float8, int8 and int4."""
