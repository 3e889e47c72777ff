"""A job that continues while its processes die, are cut off, or come: --elastic. Experimental."""
