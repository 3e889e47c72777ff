"""`launch pack`: the code that a job needs, as a folder."""
