"""`launch cache`: fill, compare, list and empty caches of samples.

It takes a folder of images as a job has it, and a place: a folder of packs, or a Redis or Valkey server. It
gives stored samples that stay until `rm`, and a comparison of each one with its file, byte for byte. Outside
are packs to list and delete (ls and rm -r do), and a server that does not answer: the verb ends.
"""
