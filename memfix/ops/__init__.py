"""The ops, one package each; adding an op edits no other file."""
