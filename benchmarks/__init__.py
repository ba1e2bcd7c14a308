"""Speed and memory. Correctness is checked first, and a figure that was not measured is called that."""
