"""`python -m launch VERB`: prepare, run, submit, follow and compare jobs.

A verb is a module with main(arguments), which returns the exit code and raises BadInput before it changes
anything. __main__.py has their table.
"""
