"""`launch upload` and `fetch`: move files to and from an object store."""
