"""Ownership of sandboxes, and the removal of those whose owner has ended."""
