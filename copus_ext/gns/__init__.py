"""The gradient noise scale: estimate of one step, average over steps, and where the norms come
from."""
