"""The bytes or pixels of a sample, by id: from files, packs, or a shared cache.

A store takes the index of a folder, and gives samples in one of the forms of forms.py. A sample that a cache
lacks, or a pack has damaged, is made from its file, with the same bits. Outside, and an error that names the
file: files that were changed since the scan. Stores may be used by several threads, pickled, and forked.
"""
