"""The COPUS controller (arXiv 2604.26687): measures the gradient noise scale while a run trains."""

__version__ = "0.1.0"
