"""Where the figures of a run go besides its folder."""
