"""`launch upload`, `fetch` and `clean`: to and from an object store."""
