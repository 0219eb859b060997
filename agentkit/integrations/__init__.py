"""Environments of other libraries, by prefix: ``agentkit.make("PREFIX:NAME")``; importing it loads none of them."""
