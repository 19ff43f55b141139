"""Incident 004: an out-of-memory error of an image decoder, whose report recommends feed-forwards that save little."""
