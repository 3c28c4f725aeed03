"""What happens between the first gradient and the last: planning, negotiation, launch, repair."""
