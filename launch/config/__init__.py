"""Settings, keys and the plan: what the command line, the environment and the files ask for, checked."""
