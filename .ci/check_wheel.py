"""Check a wheel (the argument) that is installed in this interpreter; run outside the repository."""

import subprocess
import sys
import zipfile
from pathlib import Path

names = zipfile.ZipFile(sys.argv[1]).namelist()
strays = [name for name in names if not name.startswith(("agentkit/", "agentkit_rl-"))]
assert not strays, f"these would be installed next to agentkit in site-packages: {strays}"
for part in ("agentkit/py.typed", "agentkit/envs/base.py", "agentkit/trainers/controller.py"):
    assert part in names, f"{part} is missing"
assert any(name.endswith("licenses/LICENSE") for name in names), "the licence is missing"

measure = """
import sys, time
began = time.process_time()  # other programs do not count
import agentkit
print(time.process_time() - began)
heavy = {"torch", "transformers", "numpy", "gymnasium", "pydantic"} & set(sys.modules)
assert not heavy, f"import agentkit loads {heavy}"
assert "site-packages" in agentkit.__file__, agentkit.__file__
"""
seconds = min(float(subprocess.check_output([sys.executable, "-c", measure], timeout=60)) for _ in range(5))
assert seconds < 0.15, f"import agentkit takes {seconds:.3f} s of processor time"
everything = (
    "import importlib, pkgutil, agentkit\n"
    "names = [m.name for m in pkgutil.walk_packages(agentkit.__path__, 'agentkit.')]\n"
    # What these import is in extras.
    "extras = ('vllm', '.trainers.cluster.', '.sandboxes.server', '.alfworld.worker', '.math.worker', '.conformance',\n"
    "          'reasoning_gym_worker', '.openenv_server', '.http_server', '.endpoint.server', '.endpoint.agent',\n"
    "          '.integrations.verl', '.integrations.openrlhf', '.integrations.skyrl_',\n"
    "          '.integrations.verifiers', '.integrations.nemo_gym', '.harbor_environment', '.harbor_agent')\n"
    "names = [n for n in names if not any(part in n for part in extras)]\n"
    "for name in names: importlib.import_module(name)\n"
    "print(len(names))"
)
count = subprocess.check_output([sys.executable, "-W", "ignore", "-c", everything], text=True, timeout=300).split()[-1]
took = f"{seconds * 1000:.0f} ms"
print(f"{Path(sys.argv[1]).name}: {len(names)} files, {count} modules import, `import agentkit` in {took}")
