"""Foretoken inside other engines."""
