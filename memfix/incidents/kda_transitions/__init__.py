"""The KDA transitions: a language model that ran out of memory in its fast weights, and what its layers keep."""
