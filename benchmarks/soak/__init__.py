"""Sandboxes under long, random, hostile use: ``python -m benchmarks.soak``."""
