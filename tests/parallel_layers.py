"""A toy transformer that can be split by tensor, sequence, pipeline and experts; whole, it is the reference."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, WORDS, LENGTH, BATCH, EXPERTS, LAYERS = 8, 2, 11, 4, 2, 4, 2


def _gathered(x, group):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def _sum(x, group):
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def _own(x, group):
    return x.chunk(dist.get_world_size(group))[dist.get_rank(group)]


EXCHANGES = {
    "copy": (lambda x, _: x.clone(), _sum),
    "sum": (_sum, lambda x, _: x.clone()),
    "gather": (_gathered, lambda x, group: _own(_sum(x, group), group)),
    "sum and scatter": (lambda x, group: _own(_sum(x, group), group), _gathered),
    "scatter": (_own, _gathered),
    "collect": (_gathered, _own),
}


class Exchange(torch.autograd.Function):
    """Applies one of ``EXCHANGES`` to the values, and its counterpart to the gradients."""

    @staticmethod
    def forward(ctx, x, kind, group):
        ctx.of = kind, group
        return EXCHANGES[kind][0](x, group)

    @staticmethod
    def backward(ctx, gradient):
        kind, group = ctx.of
        return EXCHANGES[kind][1](gradient, group), None, None


class Split:
    """How this rank's part of the model is connected with the others'.

    Args:
        tensor: The group that splits tensors.
        sequence: Whether it splits the sequence too.
        experts: The group that splits experts.
        stage: This rank's place in the pipeline.
        stages: The length of the pipeline.
    """

    def __init__(self, tensor=None, sequence=False, experts=None, stage=0, stages=1):
        self.tensor, self.sequence, self.experts = tensor, sequence, experts
        self.ranks = 1 if tensor is None else dist.get_world_size(tensor)
        self.rank = 0 if tensor is None else dist.get_rank(tensor)
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.layers = range(LAYERS)[stage * LAYERS // stages : (stage + 1) * LAYERS // stages]
        count = EXPERTS if experts is None else EXPERTS // dist.get_world_size(experts)
        first = 0 if experts is None else count * dist.get_rank(experts)
        self.local_experts = range(first, first + count)

    def apply(self, x, kind):
        return x if self.tensor is None else Exchange.apply(x, kind, self.tensor)

    def enter(self, x):
        return self.apply(x, "gather" if self.sequence else "copy")

    def leave(self, x):
        return self.apply(x, "sum and scatter" if self.sequence else "sum")

    def part(self, name, tensor):
        """This rank's part of a parameter of the whole model."""
        dimension = {"qkv": 1, "out": 1, "up": 0, "down": 1}.get(name.split(".")[-1])
        return tensor if dimension is None else tensor.chunk(self.ranks, dimension)[self.rank]


class Attention(nn.Module):
    def __init__(self, split):
        super().__init__()
        self.split = split
        self.qkv = nn.Parameter(torch.empty(3, WIDTH // split.ranks, WIDTH))
        self.out = nn.Parameter(torch.empty(WIDTH, WIDTH // split.ranks))

    def forward(self, x):
        x = self.split.enter(x)
        q, k, v = (F.linear(x, w).unflatten(-1, (-1, WIDTH // HEADS)).permute(1, 2, 0, 3) for w in self.qkv)
        mixed = ((q @ k.mT) / 2).softmax(-1) @ v
        return self.split.leave(F.linear(mixed.permute(2, 0, 1, 3).flatten(2), self.out))


class Dense(nn.Module):
    def __init__(self, split):
        super().__init__()
        self.split = split
        self.up = nn.Parameter(torch.empty(2 * WIDTH // split.ranks, WIDTH))
        self.down = nn.Parameter(torch.empty(WIDTH, 2 * WIDTH // split.ranks))
        self.shift = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x):
        return self.split.leave(F.linear(torch.tanh(F.linear(self.split.enter(x), self.up)), self.down)) + self.shift


class Experts(nn.Module):
    """Each token goes to one expert; an expert without tokens is not reached by backward."""

    def __init__(self, split):
        super().__init__()
        self.split = split
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({str(e): nn.Linear(WIDTH, WIDTH) for e in split.local_experts})
        if split.experts is not None:
            for parameter in self.experts.parameters():
                parameter.allreduce = False

    def forward(self, x):
        tokens = x.flatten(0, 1)
        gates = self.router(tokens).softmax(-1)
        group = self.split.experts
        if group is not None:
            tokens, gates = Exchange.apply(tokens, "gather", group), Exchange.apply(gates, "gather", group)
        choice = gates.argmax(-1)
        result = tokens * 0 + 0 * gates.sum(-1, keepdim=True)
        for e, expert in self.experts.items():
            mine = choice == int(e)
            if mine.any():
                place = mine.nonzero().squeeze(1)
                result = result.index_add(0, place, gates[place, int(e)].unsqueeze(-1) * expert(tokens[place]))
        if group is not None:
            result = Exchange.apply(result, "sum and scatter", group)
        return result.unflatten(0, x.shape[:2])


class Layer(nn.Module):
    def __init__(self, split, body):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = Attention(split)
        self.body = body(split)

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.body(self.norms[1](x))


class Toy(nn.Module):
    """Words `(LENGTH, BATCH)` to logits; a later stage takes activations instead, an earlier one gives them.

    The output is the embedding of the first stage, and positions are added at both ends.
    """

    share_embeddings_and_output_weights = True

    def __init__(self, split=None):
        super().__init__()
        self.split = split = split or Split()
        if split.is_first or split.is_last:
            self.words = nn.Embedding(WORDS, WIDTH)
            self.position_embeddings = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleDict({str(k): Layer(split, (Dense, Experts)[k]) for k in split.layers})
        if split.is_last:
            self.norm = nn.LayerNorm(WIDTH)
        self.double()
        self.load(whole() if split.ranks > 1 or split.experts or not (split.is_first and split.is_last) else None)
        if split.ranks > 1:
            for name, parameter in self.named_parameters():
                parameter.tensor_model_parallel = split.part(name, torch.empty(2, 2, 2)).numel() < 8
        if split.sequence:
            replicated = ("norm", "shift", "router", "experts")
            for name, parameter in self.named_parameters():
                parameter.sequence_parallel = any(word in name for word in replicated)

    def shared_embedding_or_output_weight(self):
        return self.words.weight if self.split.is_first or self.split.is_last else None

    def load(self, reference):
        """Take over the parameters of `reference`; random ones if it is None."""
        generator = torch.Generator().manual_seed(3)
        given = dict(reference.named_parameters()) if reference is not None else {}
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if reference is None:
                    parameter.copy_(0.5 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
                else:
                    parameter.copy_(self.split.part(name, given[name]))

    def forward(self, x):
        split = self.split
        if split.is_first:
            x = self.words(x) + self.position_embeddings.weight.unsqueeze(1)
        if split.sequence:
            x = split.apply(x, "scatter")
        for layer in self.layers.values():
            x = layer(x)
        if split.is_last:
            x = self.norm(x)
        if split.sequence:
            x = split.apply(x, "collect")
        if split.is_last:
            x = F.linear(x + self.position_embeddings.weight.unsqueeze(1), self.words.weight)
        return x


def whole():
    """The model of one process."""
    return Toy(Split())


def words(step, rank, micro):
    """Inputs and targets, each `(LENGTH, BATCH)`."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * rank + micro)
    return torch.randint(WORDS, (2, LENGTH, BATCH), generator=generator)


def loss_of(logits, targets, *, reduction="mean"):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


def reference_gradients(step, ranks, micros, *, reduction="mean", model=None):
    """By name: the mean over `ranks` of the sum over micro-batches; the sum over tokens divided by their number."""
    model = model or whole()
    model.zero_grad()
    for rank in range(ranks):
        for micro in range(micros):
            x, y = words(step, rank, micro)
            loss_of(model(x), y, reduction=reduction).backward()
    divisor = ranks if reduction == "mean" else ranks * micros * LENGTH * BATCH
    return {
        name: None if parameter.grad is None else parameter.grad / divisor
        for name, parameter in model.named_parameters()
    }
