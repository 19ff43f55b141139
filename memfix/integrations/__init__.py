"""Callbacks for other people's trainers. Each module imports the trainer's package, which memfix does not need."""
