"""The engine: plans, negotiates, launches and repairs the reduction of one module's gradients."""
