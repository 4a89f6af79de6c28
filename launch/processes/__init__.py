"""Child processes: their start, their control channels, the pools that keep them alive."""
