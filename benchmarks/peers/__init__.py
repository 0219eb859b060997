"""agentkit beside TRL's GRPOTrainer, on the same tasks, model and machine: ``python -m benchmarks.peers``."""
