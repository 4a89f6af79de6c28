"""What any room may use: flags, failures, programs, logs, the status line."""
