"""The commands ``python -m ppe_ddp bench ...``: what each measures is in the file of its name."""
