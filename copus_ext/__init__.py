"""COPUS (arXiv 2604.26687): measures the gradient noise, plans, decides, and moves the run."""

__version__ = "0.1.0"
