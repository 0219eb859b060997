"""What all tests share."""

from __future__ import annotations

import os

# Two threads a test would fight over the cores with the processes that the tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test talks to the network unless it says so.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

from requiring import require

__all__ = ["require"]
