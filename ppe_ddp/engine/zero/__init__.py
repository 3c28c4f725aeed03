"""ZeRO stage 1: gradients reduce-scattered to the ranks that own their shards, and parameters gathered from them."""
