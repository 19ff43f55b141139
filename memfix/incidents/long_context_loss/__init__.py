"""An out-of-memory error of a 4B decoder in its loss, at 131,072 tokens."""
