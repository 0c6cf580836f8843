"""What touches weights: base models, training, answering, judging, serving. Runs in child processes."""
