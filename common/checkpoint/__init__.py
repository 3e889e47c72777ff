"""Save, resume and stop a run; keep its results at a URL."""
