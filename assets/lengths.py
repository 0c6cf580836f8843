"""`token_counts`: how long the long samples are, counted once by a child process that has the model's tokenizer."""
