"""The version of this distribution, alone: whoever asks for it imports nothing else."""

__version__ = "0.1.0"
