"""`launch simulate`: run a job as a platform would.

It takes a script with its arguments, a platform, numbers of nodes and processes, and faults. It starts the
nodes as processes of this machine, each with folders of its own, and gives a table and an exit code. One
thread runs in rounds: it reads the lines of the nodes, fires faults, and restarts failed nodes that may be.
Outside are networks between machines, and data in memory for the fault slow_data.
"""
