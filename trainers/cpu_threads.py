"""How many CPU threads a role computes with.

Invariant: roles in one process do not change each other's number.
"""

from __future__ import annotations

import torch


def use_threads(number: int) -> None:
    """Make torch compute with ``number`` CPU threads when it is called from the calling thread."""
    # torch keeps the number per thread. In its first use by a thread it takes over the last number that any thread set.
    torch.get_num_threads()
    torch.set_num_threads(number)
