"""Collectives in memory that the ranks of one node share: no message, and no rank waits for the slower ones."""
