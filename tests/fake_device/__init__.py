"""The trainer's step on a GPU that is not there (workers/trainer/fake_device): do the ranks' exchanges match, what of memory, operators and waits."""
