"""An out-of-memory error of a language model, in the transitions of its Kimi Delta Attention."""
