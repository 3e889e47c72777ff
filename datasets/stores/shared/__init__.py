"""Caches that several nodes share (Redis)."""
