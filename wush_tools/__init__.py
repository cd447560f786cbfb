"""What is not the method: reading and refusing, evaluating, transformers, the command line, measuring."""
