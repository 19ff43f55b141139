"""The ops. Each is a folder of its own; adding one edits nothing else."""
