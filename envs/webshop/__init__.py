"""WebShop: the shop as pages in ``session``, its rewards in ``reward``, the text layer in ``env``."""

from agentkit.envs.webshop.env import WebShop as WebShop
