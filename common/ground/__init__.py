"""What every other room of a job uses: the end of a job, its secrets, its streams, locks of files."""
