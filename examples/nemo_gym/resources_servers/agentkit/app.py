"""Serve an environment of agentkit."""

from agentkit.integrations.nemo_gym import AgentkitServer

if __name__ == "__main__":
    AgentkitServer.run_webserver()
