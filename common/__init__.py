"""What every job needs: options, processes, checkpoints, logs. Jobs import it unchanged."""

__version__ = "0.9.0"
