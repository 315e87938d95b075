"""What training and decoding cost at a given shape: seconds by stage, memory, and the work that must be done."""
