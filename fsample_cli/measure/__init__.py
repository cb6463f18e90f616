"""How numbers are made. Prints nothing; may import torch."""
