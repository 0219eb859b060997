"""Worker processes for environments."""
