"""Tools for testing back ends and code that uses sandboxes."""
