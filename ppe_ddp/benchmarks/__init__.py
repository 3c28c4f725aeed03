"""The commands ``python -m ppe_ddp bench ...``: each is in the file of its name."""
