"""Goals and limits of the benchmark."""

TURNS_PER_S = 5000
"""Turns per second of one core of the controller, with the router, the channel and observations that are all new."""
LARGEST_GROWTH = 1.25
"""CPU per turn with the most episodes in flight, relative to the fewest."""
TOLERANCE = 1e-4
"""Largest difference of log-probabilities between an engine and a forward pass. Other versions differ by far more."""
