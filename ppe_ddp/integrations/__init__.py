"""Adapters to tools that construct torch's wrapper by themselves; each imports its library when it is imported."""
