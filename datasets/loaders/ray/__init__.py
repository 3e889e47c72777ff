"""An engine on actors of Ray: pool.py connects and orders the tasks, worker.py is the actor."""
