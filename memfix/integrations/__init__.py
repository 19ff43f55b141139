"""Callbacks for third-party trainers. Each module imports its trainer's package, which memfix does not depend on."""
