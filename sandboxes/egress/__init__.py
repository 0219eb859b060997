"""The HTTP proxy through which a sandbox reaches allowed addresses."""
