"""`python -m launch VERB`: prepare, run, submit, follow and compare jobs."""
