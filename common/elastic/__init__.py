"""A job whose processes may die, be cut off, or come, while it goes on: --elastic. Experimental."""
