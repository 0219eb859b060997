"""Task directories of Harbor for tests; their images are built on ``agentkit/base``, which needs no registry."""

from __future__ import annotations

from pathlib import Path

DOCKERFILE = "FROM agentkit/base\nUSER root\nWORKDIR /app\nCOPY numbers.txt /app/\n"
CONFIG = """\
schema_version = "1.4"

[task]
name = "agentkit/{name}"

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 60.0

[environment]
network_mode = "no-network"
memory_mb = 512
cpus = 1
{more}"""
TEST = """\
#!/bin/bash
if [ "$(cat /app/sum.txt)" = "$(paste -sd+ /app/numbers.txt | python3 -c 'print(eval(input()))')" ]; then
    echo 1 >/logs/verifier/reward.txt
else
    echo 0 >/logs/verifier/reward.txt
fi
"""
SOLUTION = "#!/bin/bash\npython3 -c 'print(sum(map(int, open(\"numbers.txt\"))))' >sum.txt\n"
ANSWER = "bash echo 60 >sum.txt"
WRONG = "bash echo 61 >sum.txt"


def write_task(
    folder: Path,
    *,
    test: str = TEST,
    solution: str | None = SOLUTION,
    more: str = "",
    dockerfile: str | None = DOCKERFILE,
    instruction: str = "Write the sum of the numbers in numbers.txt to sum.txt.\n",
    config: str = CONFIG,
) -> Path:
    """Write a task whose name is that of the folder, and return the folder."""
    files = {
        "task.toml": config.format(name=folder.name, more=more),
        "instruction.md": instruction,
        "tests/test.sh": test,
        "environment/numbers.txt": "10\n20\n30\n",
    }
    files |= {} if solution is None else {"solution/solve.sh": solution}
    files |= {} if dockerfile is None else {"environment/Dockerfile": dockerfile}
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    return folder
