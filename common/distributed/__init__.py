"""Start, connect and stop the processes of a job; devices, ranks and collectives.

It takes a Topology, which common/platform has checked, and gives each process its device, and all of them one
store and one process group, or the same error on every rank. Outside are nodes with different numbers of
processes, and processes that come and go (common/elastic).
"""
