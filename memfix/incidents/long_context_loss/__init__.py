"""The 131,072-token loss: a decoder that ran out of memory in its loss, its train step, and its stages of memory."""
