"""The benchmarks that make the figures of the documentation, from a checkout: ``python -m benchmarks NAME``."""

from ppe_ddp.cli import Command

COMMANDS = (
    Command("scaling", "a model of a step: held to nodes, drawn to 10,000 ranks", "benchmarks.scaling"),
    Command("timeline", "draws a step of ppe_ddp below one of torch DDP", "benchmarks.timeline"),
    Command("training", "small tasks to a loss, by each compressor", "benchmarks.training"),
    Command("mask", "what weights, times and digests in a step cost", "benchmarks.mask"),
    Command("memory", "the peak memory of a rank, beside torch", "benchmarks.memory"),
    Command("load", "a checkpoint into shards, beside torch", "benchmarks.load"),
)
"""All commands, in the order in which help lists them."""
