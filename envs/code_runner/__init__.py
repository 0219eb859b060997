"""Execution of programs that a model wrote, in sandboxes."""
