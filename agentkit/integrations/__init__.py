"""Interfaces of other projects: their environments played here, ours played there; importing it loads none of them."""
