"""Recipes of the images that sandboxes run: data of ``agentkit.sandboxes.images.build``, which builds them."""
