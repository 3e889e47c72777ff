"""Start, connect and stop the processes of a job; devices, ranks and collectives."""
