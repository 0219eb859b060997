"""WebShop: shopping in a web shop with text pages."""

from agentkit.envs.webshop.env import WebShop as WebShop
