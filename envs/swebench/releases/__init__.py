"""SWE tasks made from consecutive releases of Python packages."""
