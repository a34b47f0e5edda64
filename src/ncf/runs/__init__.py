"""A run's directory on disk."""
