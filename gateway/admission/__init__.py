"""Which requests are admitted now, which wait, which are refused: permits, keys, quotas, deadlines."""
