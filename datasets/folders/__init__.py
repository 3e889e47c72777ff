"""Image folders: index, listing, decoding, pairs.

It takes a folder, a table of paths, or tar files, and gives an index: the complete images of a split by id,
with labels, sizes, checksums and a fingerprint. The first scan reads each file once; later starts compare
sizes and times. Outside, and refused with the reason: folders that may be splits or masks, links that lead
nowhere, more bad images than the user allows.
"""
