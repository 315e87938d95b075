"""What the training module is made of besides the parts of a recipe: guard, log, optimizer."""
