"""A transformer saved as safetensors shards, loaded once on rank 0, and sharded over the ranks by FSDP2.

    python examples/load_transformer.py
    python -m torch.distributed.run --standalone --nproc_per_node=4 examples/load_transformer.py

The model is one of `transformers`, built from a config of its own, so that nothing is downloaded. Rank 0 writes the
checkpoint as `save_pretrained` does. Then every rank builds the model without memory for its parameters, shards it,
and receives its own shards and nothing else. In the end one forward is compared with the unsharded model's.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import ppe_ddp
from command_line import parser_for, positive
from ppe_ddp.sharding import DistModule


def parse_arguments() -> argparse.Namespace:
    parser = parser_for(__doc__)
    parser.add_argument("--layers", type=positive, default=8, help="of the model")
    parser.add_argument("--width", type=positive, default=256, help="of a layer: a multiple of 8")
    options = parser.parse_args()
    if options.width % 8:
        parser.error(f"argument --width: {options.width} is no multiple of 8")
    return options


def make_config(options: argparse.Namespace) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=2048,
        hidden_size=options.width,
        intermediate_size=4 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )


def save(config: LlamaConfig, folder: Path) -> LlamaForCausalLM:
    """A model with random weights, and its checkpoint: several files, and an index of them."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder, max_shard_size="8MB")
    return model


def build(config: LlamaConfig, job: ppe_ddp.Job) -> nn.Module:
    """The same model, with its parameters on the meta device, sharded over all ranks."""
    # Buffers such as those of rotary embeddings are in no checkpoint: they are made here.
    with job.device, init_empty_weights(include_buffers=False):
        model = LlamaForCausalLM(config).eval()
    model.tie_weights()
    mesh = init_device_mesh(job.device.type, (job.world_size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def local_nbytes(model: nn.Module) -> int:
    parts = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return sum(part.nbytes for part in parts)


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(input_ids=tokens).logits
    return result


def main() -> None:
    options = parse_arguments()
    job = ppe_ddp.init_process_group()
    logging.disable_progress_bar()
    config = make_config(options)
    tokens = torch.arange(64).view(2, 32).to(job.device)
    with tempfile.TemporaryDirectory() as folder:
        whole = save(config, Path(folder)) if job.rank == 0 else None
        model = build(config, job)
        dist.barrier()
        begin = time.perf_counter()
        # Only rank 0 looks at the folder.
        missing, unexpected = DistModule(model).load_checkpoint(folder, assign=True)
        seconds = time.perf_counter() - begin
        count = len(list(Path(folder).glob("*.safetensors")))
    output = logits(model, tokens)
    everyones = [0] * job.world_size
    dist.all_gather_object(everyones, local_nbytes(model))

    if whole is not None:
        expected = logits(whole.to(job.device), tokens)
        table = Table(
            title=f"Llama of {options.layers} layers, ranks: {job.world_size}", title_justify="left", show_header=False
        )
        table.add_column("")
        table.add_column("", justify="right")
        table.add_row("checkpoint", f"{count} files")
        table.add_row("keys missing, unexpected", f"{len(missing)}, {len(unexpected)}")
        table.add_row("whole model", f"{local_nbytes(whole) / 2**20:.1f} MiB")
        table.add_row("on each rank", ", ".join(f"{nbytes / 2**20:.1f}" for nbytes in everyones) + " MiB")
        table.add_row("loaded in", f"{1e3 * seconds:.0f} ms")
        table.add_row("largest difference of logits", f"{(output - expected).abs().max().item():.1e}")
        Console().print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
