"""Incident 004: an out-of-memory error of a decoder of images, whose recommended feed-forwards save little memory."""
