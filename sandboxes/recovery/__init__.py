"""Recovery of failed sandboxes: supervisor, standbys, hedged calls and replay."""
