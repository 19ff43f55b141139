"""What is run on a GPU to hold the workspace rules against it: small steps, family by family, over ranges of shapes."""
