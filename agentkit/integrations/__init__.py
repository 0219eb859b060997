"""Interfaces of other projects: their environments played here, ours played there.

Invariant: nothing here is imported until it is asked for, and no package of another project is required.
"""
