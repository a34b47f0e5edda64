"""Scores become metrics and lists."""
