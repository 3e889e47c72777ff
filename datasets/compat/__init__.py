"""The interfaces of tools that Bootfile replaces."""
