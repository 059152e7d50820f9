"""The demos of the command line: real training, and an error on purpose. Each module imports only earlier ones.

- `language`: the character language model, in plain NumPy, and the text that it learns.
- `training`: data-parallel training of it.
- `text`: the demo that trains, and prints a sample.
- `mismatch`: the demo of the report on replicas that disagree.
"""
