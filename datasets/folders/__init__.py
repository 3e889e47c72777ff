"""Image folders: index, listing, decoding, pairs."""
