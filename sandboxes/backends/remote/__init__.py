"""Sandboxes on sandbox servers."""
