"""The gate on time: each form against itself at another commit, and against naive, in fresh processes."""
