"""What 91 training steps took on an H200, and the same steps simulated."""
