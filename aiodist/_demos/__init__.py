"""The demos of the command line: training, and an error on purpose (floor 11). Each module imports only earlier ones.

- `language`: the character language model, in plain NumPy, and the text that it learns.
- `text`: the demo that trains it on replicas, and prints a sample.
- `mismatch`: the demo of the report on replicas that disagree.
"""
