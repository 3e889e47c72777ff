"""`launch new`: write a project of the user's own.

It takes a new or empty folder, and options that choose among the blocks of Bootfile's jobs. It gives a job, a
test, job.toml and links to this copy of Bootfile, or copies. Outside, and refused before the folder is made:
options whose blocks replace the same lines.
"""
