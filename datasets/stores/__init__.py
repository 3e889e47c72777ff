"""Where a sample's bytes come from, by id.

A store has `form`, "encoded" or "decoded"; image(id, scratch) -> uint8 [height, width, 3], perhaps smaller
than the index says; encoded(id) -> bytes where the form is "encoded"; and close(). Threads may share one.
"""
