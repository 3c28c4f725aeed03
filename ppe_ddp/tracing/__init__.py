"""Timelines: what each rank computes and sends, on one clock, as pictures and as a file for Perfetto."""

from ppe_ddp.tracing.timeline import timeline

__all__ = ["timeline"]
