"""What concerns SGLang alone, in an environment of its own (`make test-sglang`)."""
