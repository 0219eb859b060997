"""SWE tasks out of anybody's releases: ``index`` (source archives), ``trees`` (what changed), ``environment`` (the
image), ``build`` (the task), ``shipped`` (the pairs that are known to work), ``store`` (where they lie)."""
