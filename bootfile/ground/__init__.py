"""Exit codes, errors, files and long waits: what every other room uses.

Takes: paths of a POSIX file system, local or mounted.
Gives: a file that is whole or not there (files.py), one process at a time in a folder (folder_lock.py), a
read that is repeated if a mount may answer later (again.py), one line and one exit code for each error
(errors.py, exit_codes.py).
Outside: Windows, and a file system without rename(): a write fails with the reason of the system.
"""
