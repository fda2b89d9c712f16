"""hotprefix: an LLM engine and experiment lab whose main character is the prefix cache."""

__version__ = "0.1.0"
