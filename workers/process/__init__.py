"""The life of worker processes: fork server, main loop, what is asked of the kernel."""
