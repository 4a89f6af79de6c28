"""What memory models need: predicted, remembered, and compared with a budget."""
