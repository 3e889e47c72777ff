"""Check a node before work starts."""
