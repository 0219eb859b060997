"""A page about live and finished runs: queries over run directories, a server, and a static copy."""
