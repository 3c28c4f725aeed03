"""One process that does what the ranks did, and what a history is held to."""

import torch

from law_steps import Reference

TOLERANCE = 1e-5  # where a gradient came in two rounds, whose sums are made in another order


class ExactReference(Reference):
    """All ranks in one process, averaged in the order in which the simulated wire sums.

    Attributes:
        local: By rank, the gradients by name that it had before they were averaged; its own, as no step changes them.
    """

    def _average(self):
        self.local = [{name: _copy(p.grad) for name, p in table.items()} for table in self._parameters]
        expectation = super()._average()
        means, count = {}, len(self._parameters)
        for name, own in self._parameters[0].items():
            given = [table[name] for table in self.local]
            if all(gradient is None for gradient in given):
                means[name] = None
                continue
            dense = [torch.zeros_like(own) if g is None else g for g in given]
            total = torch.mul(dense[0], 1.0 / count)
            for gradient in dense[1:]:
                total = total + torch.mul(gradient, 1.0 / count)
            means[name] = total.detach()
            for table in self._parameters:
                table[name].grad = means[name].clone()
        expectation.means.update(means)
        return expectation

    def update(self, rate):
        """Take a step of plain gradient descent, as :func:`update` does on the ranks."""
        for copy in self.copies:
            update(copy, rate)


def update(module, rate):
    """Take a step of plain gradient descent."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=rate)


def table_of(module):
    """Copies of the gradients by name."""
    return {name: _copy(parameter.grad) for name, parameter in module.named_parameters()}


def _copy(gradient):
    return None if gradient is None else gradient.detach().clone()


def differences(found, expected, *, exact=True, scales=None):
    """Where gradients are not what they should be, as texts."""
    texts = []
    for name, want in expected.items():
        got = found[name]
        if want is None or got is None:
            if want is not got:
                texts.append(f"{name} is {got}, and should be {want}")
        elif exact and not torch.equal(got, want):
            texts.append(f"{name} is {got.tolist()}, and should be exactly {want.tolist()}")
        elif not torch.allclose(got, want, rtol=TOLERANCE, atol=TOLERANCE * (1 + (scales or {}).get(name, 0.0))):
            texts.append(f"{name} is {got.tolist()}, and should be {want.tolist()}")
    return texts
