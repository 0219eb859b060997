"""The agent that runs inside each sandbox, and the host's side of its connection."""
