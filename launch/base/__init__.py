"""What every room of `launch` may use: exit codes and the failures behind them, command lines of our own modules."""
