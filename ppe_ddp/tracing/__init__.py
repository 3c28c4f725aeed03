"""Timelines: what each rank computes and sends, on one clock, as a file for Perfetto and as pictures."""

from ppe_ddp.tracing.timeline import timeline

__all__ = ["timeline"]
