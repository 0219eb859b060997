"""``python -m agentkit`` is the ``agentkit`` command."""

from agentkit.cli import main

if __name__ == "__main__":
    main()
