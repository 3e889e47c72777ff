"""Read and write an object store (S3, OBS) without damage."""
