"""`launch upload`, `fetch` and `clean`: move files to and from an object store."""
