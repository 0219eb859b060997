"""A process gives back what the tensors of one of its threads took."""

from __future__ import annotations

import ctypes
import subprocess
import sys

from requiring import require

PROGRAM = """
import threading
import psutil, torch
from agentkit.trainers.freed_memory import release_freed_memory

def compute():  # blocks below the size that the C library takes from the system one by one
    blocks = [torch.ones(2**20) for _ in range(300)]
    keep.append(blocks[-1])  # at the end of the heap, so that the heap cannot shrink

keep = []
assert not release_freed_memory()
large = torch.ones(7 * 2**20)  # 28 MB: once it is freed, the library keeps blocks of up to this size
del large
thread = threading.Thread(target=compute)
thread.start()
thread.join()
before = psutil.Process().memory_info().rss
released = release_freed_memory()
print(released, before - psutil.Process().memory_info().rss)
"""


def test_freed_memory_of_a_thread_is_returned():
    require(hasattr(ctypes.CDLL(None), "mallinfo2"), "run it on Linux with glibc 2.33 or later")
    output = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert output.returncode == 0, output.stderr
    released, size = output.stdout.split()
    assert released == "True"
    assert int(size) > 2**30
