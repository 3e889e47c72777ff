"""`python -m launch VERB`: what is done with jobs, before, around and after them."""
