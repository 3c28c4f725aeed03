"""Checkpoints to go on from after a job was killed: never torn, verified, with everything that training depends on."""
