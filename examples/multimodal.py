"""Questions about digits, some with a picture; in some batches there is none, on some ranks or on all of them.

    python examples/multimodal.py
    python -m torch.distributed.run --standalone --nproc_per_node=2 examples/multimodal.py
    python -m torch.distributed.run --standalone --nproc_per_node=2 examples/multimodal.py --transformers

"the digit after seven is", or "the digit after this is" and a handwritten seven, one of scikit-learn's 1797 images.
Steps come in fours: one without pictures, two in which every other rank has some, and one in which every rank has.
Batches without pictures are larger, so each loss is weighed by its questions.

The same training is done by one process, by torch's DistributedDataParallel with `find_unused_parameters=True`, and
by ppe_ddp, which needs no flag and no dummy picture, and sends nothing of the vision tower where no rank has pictures.
With `--transformers` the model is a small LLaVA, trained by transformers' Trainer through each of the two wrappers.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import ppe_ddp
from command_line import parser_for, positive

WIDTH, HELD_OUT = 128, 300
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
WORDS = [*DIGITS, "before", "like", "after", "the", "digit", "is", "this"]  # a digit is the number of its word
LIKE, THE, DIGIT, IS, THIS = (WORDS.index(word) for word in ("like", "the", "digit", "is", "this"))


class Batch(NamedTuple):
    """Questions (N, 5), their pictures (N, 1, 8, 8) or None, and the answers (N,)."""

    words: Tensor
    pictures: Tensor | None
    answers: Tensor


class Questions:
    """Batches by step and rank."""

    def __init__(self, size: int) -> None:
        images, labels = load_digits(return_X_y=True)
        self.images = torch.as_tensor(images / 8 - 1).float().view(-1, 1, 8, 8)
        self.labels, self.size = torch.as_tensor(labels), size

    def shows(self, step: int, ranks: Iterable[int]) -> bool:
        """Whether some of these ranks have pictures in this step."""
        return step % 4 == 3 or (step % 4 > 0 and any((step + rank) % 2 == 0 for rank in ranks))

    def batch(self, step: int, rank: int) -> Batch:
        shows = self.shows(step, [rank])
        random = torch.Generator().manual_seed(100_003 * step + rank)
        among, size = len(self.labels) - HELD_OUT, self.size * (1 if shows else 2)
        return self._ask(HELD_OUT + torch.randint(among, (size,), generator=random), random, shows=shows)

    def exam(self) -> Batch:
        """Questions with the pictures that are in no batch."""
        return self._ask(torch.arange(HELD_OUT), torch.Generator().manual_seed(0), shows=True)

    def _ask(self, chosen: Tensor, random: torch.Generator, *, shows: bool) -> Batch:
        digits, relations = self.labels[chosen], torch.randint(-1, 2, chosen.shape, generator=random)
        asked = torch.full_like(digits, THIS) if shows else digits
        the, digit, is_ = (torch.full_like(digits, word) for word in (THE, DIGIT, IS))
        words = torch.stack([the, digit, LIKE + relations, asked, is_], 1)
        return Batch(words, self.images[chosen] if shows else None, (digits + relations) % 10)


class VisionAndText(nn.Module):
    """Two towers and a head; without pictures, the vision tower is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.vision_tower = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.GELU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.GELU()),
            *(nn.Flatten(), nn.Linear(1024, 512), nn.GELU(), nn.Linear(512, WIDTH)),
        )
        self.words = nn.Embedding(len(WORDS), WIDTH)
        self.text_tower = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 512), nn.GELU(), nn.Linear(512, 10))

    def forward(self, words: Tensor, pictures: Tensor | None = None) -> Tensor:
        x = self.words(words)
        if pictures is not None:
            x = x + self.vision_tower(pictures)[:, None] * (words == THIS)[..., None]
        return self.head(self.text_tower(x)[0][:, -1])


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch.words, batch.pictures), batch.answers)


def backward_alone(model: nn.Module, batches: list[Batch], rank: int) -> None:
    total = sum(len(batch.answers) for batch in batches)
    for batch in batches:
        (loss_of(model, batch) * (len(batch.answers) / total)).backward()


def backward_torch(model: nn.Module, batches: list[Batch], rank: int) -> None:
    count = len(batches[rank].answers)
    dist.all_reduce(total := torch.tensor(count))
    (loss_of(model, batches[rank]) * (len(batches) * count / total)).backward()


def backward_ppe_ddp(model: nn.Module, batches: list[Batch], rank: int) -> None:
    ppe_ddp.weigh(loss_of(model, batches[rank]), len(batches[rank].answers)).backward()


class Contestant:
    """A way to train, and what each step took and sent, by whether any rank had pictures."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.optimizer = module, torch.optim.AdamW(module.parameters(), eps=1e-4)
        self.milliseconds: dict[bool, list[float]] = defaultdict(list)
        self.sent_nbytes: dict[bool, list[int]] = defaultdict(list)
        self.sent_of_vision: dict[bool, list[int]] = defaultdict(list)

    def note(self, model: nn.Module, seconds: float, shows: bool) -> None:
        """Note a step, in which some rank has pictures or none."""
        self.milliseconds[shows].append(1e3 * seconds)
        nbytes = {name: parameter.nbytes for name, parameter in self.module.named_parameters()}
        if isinstance(model, ppe_ddp.DistributedDataParallel):
            trace = model.trace()
            sent, names = trace.gradient_nbytes, trace.agreed
        else:  # torch sends every gradient in every step, one process sends nothing
            names = tuple(nbytes) if isinstance(model, TorchDDP) else ()
            sent = sum(nbytes[name] for name in names)
        self.sent_nbytes[shows].append(sent)
        self.sent_of_vision[shows].append(sum(nbytes[name] for name in names if "vision_tower" in name))


def train(options: argparse.Namespace, job: ppe_ddp.Job, data: Questions) -> dict[str, Contestant]:
    """All three side by side, step by step."""
    module = VisionAndText()
    contestants = {name: Contestant(copy.deepcopy(module)) for name in ("one process", "torch DDP", "ppe_ddp")}
    alone, torchs, ours = contestants.values()
    ways: list[tuple[Contestant, nn.Module, Callable[..., None]]] = [
        (alone, alone.module, backward_alone),
        (torchs, TorchDDP(torchs.module, find_unused_parameters=True), backward_torch),
        (ours, ppe_ddp.DistributedDataParallel(ours.module), backward_ppe_ddp),
    ]
    for step in range(options.steps):
        batches = [data.batch(step, rank) for rank in range(job.world_size)]
        for contestant, model, backward in ways:
            begin = time.perf_counter()
            backward(model, batches, job.rank)
            contestant.optimizer.step()
            contestant.optimizer.zero_grad()
            contestant.note(model, time.perf_counter() - begin, data.shows(step, range(job.world_size)))
    return contestants


def make_llava() -> nn.Module:
    """A vision-text model of transformers, which sees a picture as four words."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    vision = CLIPVisionConfig(**sizes, num_attention_heads=2, image_size=8, patch_size=4, num_channels=1)
    text = LlamaConfig(**sizes, num_attention_heads=2, vocab_size=len(WORDS), max_position_embeddings=16)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=THIS, image_seq_length=4)
    return LlavaForConditionalGeneration(config)


def as_llava_likes_it(batch: Batch) -> dict[str, Tensor]:
    counts = torch.where(batch.words[0] == THIS, 4, 1)
    words = torch.cat([batch.words.repeat_interleave(counts, 1), batch.answers[:, None]], 1)
    labels = torch.full_like(words, -100)
    labels[:, -1] = batch.answers
    pictures = {} if batch.pictures is None else {"pixel_values": batch.pictures}
    return {"input_ids": words, "labels": labels} | pictures


def train_llava(options: argparse.Namespace, job: ppe_ddp.Job, data: Questions) -> dict[str, Contestant]:
    """One process by a loop, and each wrapper by its Trainer, one after another."""
    import transformers

    from ppe_ddp.integrations.transformers import Trainer

    module, ranks = make_llava(), range(job.world_size)
    contestants = {name: Contestant(copy.deepcopy(module)) for name in ("one process", "torch DDP", "ppe_ddp")}
    alone, torchs, ours = contestants.values()
    steps = [[as_llava_likes_it(data.batch(step, rank)) for rank in ranks] for step in range(options.steps)]
    for step, batches in enumerate(steps):
        begin = time.perf_counter()
        total = sum(len(batch["labels"]) for batch in batches)
        for batch in batches:
            (alone.module(**batch).loss * (len(batch["labels"]) / total)).backward()
        alone.optimizer.step()
        alone.optimizer.zero_grad()
        alone.note(alone.module, time.perf_counter() - begin, data.shows(step, ranks))
    train_by(transformers.Trainer, torchs, steps, data)
    train_by(Trainer, ours, steps, data)
    return contestants


def train_by(base: type, contestant: Contestant, steps: list[list[dict[str, Tensor]]], data: Questions) -> None:
    """Train with transformers' Trainer, or with ours, on the batches of each step and rank."""
    import transformers

    class Noting(base):
        def _get_train_sampler(self, *_: Any) -> torch.utils.data.Sampler[int]:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, *given: Any, **named: Any) -> Tensor:
            begin = time.perf_counter()
            loss = super().training_step(*given, **named)
            shows = data.shows(self.state.global_step, range(len(steps[0])))
            contestant.note(self.model_wrapped, time.perf_counter() - begin, shows)
            return loss

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            use_cpu=True,
            max_steps=len(steps),
            per_device_train_batch_size=1,  # an item of the data is a batch
            remove_unused_columns=False,
            max_grad_norm=0.0,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            ddp_find_unused_parameters=True,  # for torch's wrapper; ours takes no notice
        )
        trainer = Noting(
            contestant.module,
            arguments,
            data_collator=lambda items: items[0],
            train_dataset=[batch for batches in steps for batch in batches],
            optimizers=(contestant.optimizer, torch.optim.lr_scheduler.ConstantLR(contestant.optimizer, 1.0)),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()


@torch.no_grad()
def right(module: nn.Module, exam: Batch) -> float:
    if isinstance(module, VisionAndText):
        logits = module(exam.words, exam.pictures)
    else:
        given = as_llava_likes_it(exam)
        logits = module(given["input_ids"][:, :-1], pixel_values=exam.pictures).logits[:, -1]
    return (logits.argmax(1) == exam.answers).float().mean().item()


def distance(module: nn.Module, other: nn.Module) -> float:
    pairs = zip(module.parameters(), other.parameters(), strict=True)
    return max((mine - others).abs().max().item() for mine, others in pairs)


def report(contestants: dict[str, Contestant], job: ppe_ddp.Job, exam: Batch, console: Console) -> None:
    table = Table(title=f"Ranks: {job.world_size}", title_justify="left")
    for heading in ("", *contestants):
        table.add_column(heading, justify="right" if heading else "left")

    every, mib = contestants.values(), 2**20
    for shows, where in ((True, "pictures on some rank"), (False, "no pictures")):
        table.add_row(f"step, {where}", *(f"{statistics.median(one.milliseconds[shows]):.1f} ms" for one in every))
        table.add_row(f"sent, {where}", *(f"{statistics.fmean(one.sent_nbytes[shows]) / mib:.2f} MiB" for one in every))
    table.add_row("- of it, of the vision tower", *(f"{one.sent_of_vision[False][0]:,} bytes" for one in every))
    alone = contestants["one process"].module
    table.add_row("weights differ from one process", *(f"{distance(one.module, alone):.0e}" for one in every))
    table.add_row("right answers about new pictures", *(f"{right(one.module, exam):.1%}" for one in every))
    console.print(table)


def parse_arguments() -> argparse.Namespace:
    parser = parser_for(__doc__)
    parser.add_argument("--steps", type=positive, default=150, help="steps of each contestant")
    parser.add_argument("--batch", type=positive, default=32, help="questions in a batch with pictures")
    parser.add_argument("--transformers", action="store_true", help="a LLaVA in transformers' Trainer")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    job = ppe_ddp.init_process_group()
    console = Console(quiet=job.rank != 0, highlight=False)
    torch.manual_seed(options.seed)
    data = Questions(options.batch)
    report((train_llava if options.transformers else train)(options, job, data), job, data.exam(), console)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
