"""Container images, and archives of snapshots."""
