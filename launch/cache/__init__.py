"""`launch cache`: fill, compare, list and empty caches of samples."""
