"""`vecd check`: what is known of a model and this machine, measured."""
