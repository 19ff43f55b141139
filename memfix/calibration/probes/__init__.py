"""Small steps that run on a GPU to check the workspace rules: one file per family of operators, over many shapes."""
