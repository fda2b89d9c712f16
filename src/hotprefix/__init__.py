"""hotprefix: an LLM engine and experiment lab whose main character is the prefix cache."""

from hotprefix.compiled import search_path

__version__ = "0.2.0"
__path__ = search_path(__path__)
