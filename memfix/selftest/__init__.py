"""The self-test: plants regressions in the forms of an op and says which of them its contract would miss."""
