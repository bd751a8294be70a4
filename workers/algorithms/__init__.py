"""Advantages and objectives: pure torch functions, without processes, config objects or Megatron."""
