"""Object stores over S3's protocol: read, write and list objects, and copy folders.

It takes s3:// and obs:// URLs, with keys from the environment, and gives whole, checked files, or one
StoreError with bucket, key and cause. location.py checks the URL, the endpoint and the keys, each once, where
they enter. Outside are other protocols, and servers that do not answer as S3 does.
"""
