"""`launch upload` and `fetch`: move files to and from an object store.

They take a folder and an s3:// or obs:// URL, and skip files that are equal on both sides, by digests if the
store keeps any. The same command continues an interrupted transfer. `fetch` lists the files that it would
replace, and `upload --clean` what it would remove; both ask first. Outside are other protocols.
"""
