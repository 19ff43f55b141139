"""Compare the simulated meter's workspace rules with a real GPU, operator by operator."""
