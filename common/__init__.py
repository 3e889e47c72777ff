"""Modules that every job needs: options, processes, checkpoints, logs. Jobs import them unchanged."""

__version__ = "0.30.0"
