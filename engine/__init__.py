"""A small inference engine with speculative decoding: any CPU, and NVIDIA GPUs, behind an OpenAI-compatible server."""

__version__ = "0.1.0"
