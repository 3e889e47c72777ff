"""`bootfile prove`: whether a job continues exactly after a restart."""
