"""`launch submit`: jobs on managed platforms.

It takes job.toml, which config.py checks once, before anything is sent. It gives a job on ModelArts with a
record of it (launch/records.py), or the job file for the tool of another platform. Outside are other
services, following or stopping a job, and the upload of the code (`launch pack`, `launch upload`).
"""
