"""`launch pack`: the code that a job needs, as a folder or as one file.

It takes a script, and gives a folder <job>-<digest> with a manifest, or a zip archive that Python starts. The
same content has the same name and bytes. Outside, and refused before anything is written: text that looks
like a secret, links out of the folder, more files than a platform takes, modules that a rule skips.
"""
