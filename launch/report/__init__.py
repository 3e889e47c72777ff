"""`launch report`: one page on runs."""
