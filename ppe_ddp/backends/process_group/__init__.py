"""Base classes for process groups written in Python, whatever transport carries their tensors."""
