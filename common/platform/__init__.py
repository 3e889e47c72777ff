"""Read what the platform and this node offer."""
