"""`launch simulate`: run a job as a platform would."""
