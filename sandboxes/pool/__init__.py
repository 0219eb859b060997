"""Warm sandboxes: the pool, its scheduler, and health checks."""
