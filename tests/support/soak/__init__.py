"""Traffic, faults and surroundings of long trials, and how their figures are reported."""
