"""What the manual shows of the lock and of stored results: a file for each kind of table, used by ``ci/tables.py``."""
