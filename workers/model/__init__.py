"""Model folders as Hugging Face writes them: their architecture, what layouts allow, starting models, and the dtypes that this machine computes in.
Versions of weights in training are weights/. Start with architecture.py."""
