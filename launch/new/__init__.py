"""`launch new`: write a project of the user's own."""
