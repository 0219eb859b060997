"""Environments that run in a sandbox."""
