"""Fork ``agentkit`` commands from an interpreter with all modules imported, which saves the imports of each start.

Reads ``[arguments, log file]`` as JSON lines; answers each with the process id, and later with its exit code.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    import agentkit.trainers.controller
    import agentkit.trainers.inference.hf
    import agentkit.trainers.learner.torch_learner
    from agentkit.cli import main as agentkit
    from agentkit.config import ModelConfig
    from agentkit.trainers.models.load import load_policy, load_tokenizer

    load_tokenizer("quickstart")
    load_policy(ModelConfig(), 0)
    print("ready", flush=True)
    for line in sys.stdin:
        arguments, log = json.loads(line)
        pid = os.fork()
        if pid == 0:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for descriptor, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
                os.dup2(source, descriptor)
            sys.argv = ["agentkit", *arguments]
            sys.exit(agentkit())
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
