"""Read and write an object store (S3, OBS), with checks for damaged data."""
