"""What every process group written in Python has to have for torch.distributed, whatever carries its tensors."""
