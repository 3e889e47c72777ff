"""`launch bench`: measure loaders and jobs on this machine."""
