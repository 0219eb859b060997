"""Episodes whose container or host fails: ``python -m benchmarks.recovery``."""
