"""Three ops that save memory, each beside the function that it replaces. An example of a package that uses memfix."""
