"""ASV's benchmark folder. ASV imports every module in it at every commit, so it has no other modules."""
