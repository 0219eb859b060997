"""Sandboxes as processes of this host, behind Linux namespaces."""
