"""Play its episodes."""

from agentkit.integrations.nemo_gym import AgentkitAgent

if __name__ == "__main__":
    AgentkitAgent.run_webserver()
