"""Training runs whose containers are killed, frozen and slowed at random: ``python -m benchmarks.faults``."""
