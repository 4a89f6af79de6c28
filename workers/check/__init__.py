"""The part of `vecd check` that needs torch, in processes of its own."""
