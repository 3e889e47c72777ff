"""Modules that every job needs: options, processes, checkpoints, logs. Jobs import them unchanged."""
